"""Images for the examples, read without executing anything from a file.

Where they are looked for below ``--data-dir``; packed (``.gz``, ``.tar.gz``) or not:

    mnist      train-images-idx3-ubyte ... (idx files, also below MNIST/raw)    or  mnist*.npz
    cifar10    cifar-10-batches-py/, cifar-10-batches-bin/ or their archives    or  cifar10*.npz
    cifar100   cifar-100-python/, cifar-100-binary/ or their archives           or  cifar100*.npz

An ``.npz`` holds ``train_images`` and ``test_images``, uint8 of shape (N, H, W) or (N, H, W, 3),
and ``train_labels`` and ``test_labels``.
"""

import gzip
import io
import math
import pickle
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Split = tuple[Pixels, Labels]  # images (N, channels, height, width), labels (N,)

DIGITS_HELD_OUT = 360  # of 1797
IDX_STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
WANTED = {
    "mnist": "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte (http://yann.lecun.com/exdb/mnist/; .gz as well), or mnist.npz",
    "cifar10": "the folder cifar-10-batches-py or cifar-10-batches-bin, or cifar-10-python.tar.gz "
    "or cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html), or cifar10.npz",
    "cifar100": "the folder cifar-100-python or cifar-100-binary, or cifar-100-python.tar.gz or "
    "cifar-100-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html), or cifar100.npz",
}
BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
CIFAR = {  # folder, archive that holds it, training files, test file
    "cifar10": (
        ("cifar-10-batches-py", "cifar-10-python", BATCHES, "test_batch"),
        (
            "cifar-10-batches-bin",
            "cifar-10-binary",
            [f"{b}.bin" for b in BATCHES],
            "test_batch.bin",
        ),
    ),
    "cifar100": (
        ("cifar-100-python", "cifar-100-python", ["train"], "test"),
        ("cifar-100-binary", "cifar-100-binary", ["train.bin"], "test.bin"),
    ),
}


class Images(NamedTuple):
    """A classification task: uint8 images (N, channels, height, width) and int64 labels (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: Tensor  # of the training pixels, (channels, 1, 1)
    deviation: Tensor

    def to(self, device: str) -> "Images":
        """Everything on one device."""
        return Images(*(part.to(device) if isinstance(part, Tensor) else part for part in self))

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 pixels as float32 of mean 0 and deviation 1 over the training images."""
        return (images.float() - self.mean) / self.deviation


def load_images(name: str, directory: Path, limit: int | None = None) -> Images:
    """Read ``digits`` (needs no ``directory``), ``mnist``, ``cifar10`` or ``cifar100``.

    ``limit`` keeps that many of the first training images, mixed if they come class by class.

    Raises FileNotFoundError that says what to put where, ValueError for a damaged file, and
    pickle.UnpicklingError for a pickle that asks for anything but a uint8 array.
    """
    if name == "digits":
        train, test = _digits()
    else:
        npz = sorted(path for path in directory.glob(f"{name}*.npz"))
        public = _mnist(directory) if name == "mnist" else _cifar(name, directory)
        if public is None and not npz:
            raise FileNotFoundError(
                f"--data-dir must hold {name}, got {str(directory)!r} without it; put there "
                f"{WANTED[name]}"
            )
        train, test = public if public is not None else _npz(npz[0])
    for images, labels in (train, test):
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
            raise ValueError(
                f"{name} must be uint8 images with one label each, got {images.dtype} images of "
                f"shape {images.shape} and {len(labels)} labels; fetch the file again"
            )
    if limit is not None:
        in_order = bool((np.diff(train[1].astype(np.int64)) >= 0).all())
        count = len(train[1])
        order = np.random.default_rng(0).permutation(count) if in_order else np.arange(count)
        train = (train[0][order[:limit]], train[1][order[:limit]])
    classes = int(max(train[1].max(), test[1].max())) + 1
    tensors = [torch.tensor(part) for part in (*train, *test)]
    mean, deviation = (
        torch.tensor(part(train[0], axis=(0, 2, 3)), dtype=torch.float32)[:, None, None]
        for part in (np.mean, np.std)
    )
    return Images(*tensors, classes, mean, deviation)


def _digits() -> tuple[Split, Split]:
    """scikit-learn's bundled 8 x 8 digits; the same random fifth is always held out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None]  # grey levels 0 to 16
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:DIGITS_HELD_OUT], order[DIGITS_HELD_OUT:]
    return (images[train], labels[train]), (images[test], labels[test])


def _npz(path: Path) -> tuple[Split, Split]:
    """The npz form; ``allow_pickle=False`` is numpy's guard against code in the file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    splits = []
    for part in ("train", "test"):
        try:
            images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        except KeyError as error:
            raise ValueError(f"{path.name} must hold {error}, got {sorted(arrays)}") from None
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        splits.append((images, labels.astype(np.int64)))
    return splits[0], splits[1]


def _mnist(directory: Path) -> tuple[Split, Split] | None:
    """The four idx files, or None if they are not there."""
    for folder in (directory, directory / "MNIST" / "raw"):
        parts: list[NDArray[np.uint8]] = []
        for stem in IDX_STEMS:
            names = [stem + end for end in ("-ubyte", "-ubyte.gz")]
            names += [name.replace("-idx", ".idx") for name in names]
            path = next((folder / name for name in names if (folder / name).is_file()), None)
            if path is not None:
                parts.append(read_idx(path))
        if len(parts) == 4:
            splits = [(parts[i][:, None], parts[i + 1].astype(np.int64)) for i in (0, 2)]
            return splits[0], splits[1]
    return None


def read_idx(path: Path) -> NDArray[np.uint8]:
    """One idx file of unsigned bytes: 0, 0, type 8, rank, sizes (big-endian), data; or its .gz."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rank = raw[3] if len(raw) > 3 else 0
    header = 4 + 4 * rank
    if raw[:3] != b"\0\0\x08" or len(raw) < header:
        raise ValueError(f"{path.name} must be an idx file of unsigned bytes, got {raw[:4]!r}")
    shape = struct.unpack(f">{rank}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise ValueError(
            f"{path.name} must hold {math.prod(shape)} bytes of data for shape {shape}, "
            f"got {len(raw) - header}; fetch it again"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy()


def _cifar(name: str, directory: Path) -> tuple[Split, Split] | None:
    """The first public form of CIFAR found in the directory, or None."""
    for folder, archive, train_names, test_name in CIFAR[name]:
        files = _members(directory, folder, archive, [*train_names, test_name])
        if files is not None:
            splits = [
                read_binary_cifar(raw, 1 if name == "cifar10" else 2)
                if test_name.endswith(".bin")
                else read_pickled_cifar(raw)
                for raw in files
            ]
            images, labels = zip(*splits[:-1], strict=True)
            return (np.concatenate(images), np.concatenate(labels)), splits[-1]
    return None


def _members(directory: Path, folder: str, archive: str, names: list[str]) -> list[bytes] | None:
    """The files' bytes, from the folder or out of the archive without unpacking it to disk."""
    for place in (directory / folder, directory):
        if all((place / name).is_file() for name in names):
            return [(place / name).read_bytes() for name in names]
    path = directory / f"{archive}.tar.gz"
    if not path.is_file():
        return None
    with tarfile.open(path) as tar:
        contents = {}
        for member in tar:  # one pass: a gzipped archive cannot seek cheaply
            file = tar.extractfile(member)
            if file is not None and Path(member.name).name in names:
                contents[Path(member.name).name] = file.read()
    if missing := [name for name in names if name not in contents]:
        raise ValueError(f"{path.name} must hold {folder}/{missing[0]}, got none; fetch it again")
    return [contents[name] for name in names]


class _PickledDtype:
    """Stands in for numpy.dtype while unpickling: a byte array is all that CIFAR needs."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"a CIFAR batch must hold uint8 arrays, got {code!r}")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like mean nothing for single bytes."""


class _PickledArray:
    """Stands in for numpy.ndarray, whose own unpickling would have to trust the file."""

    values: NDArray[np.uint8]

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, _, fortran_order, data = state
        order = "F" if fortran_order else "C"
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order=order)  # type: ignore[call-overload]


def _latin1(text: str, _encoding: str) -> bytes:
    """Stands in for _codecs.encode, which is how Python 3 writes bytes for Python 2."""
    return text.encode("latin1")


class ArrayUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers, strings and uint8 arrays; refuses every other object."""

    ALLOWED: Mapping[tuple[str, str], Callable[..., object]] = {
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledDtype,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """The stand-in for ``module.name``; the real one is never imported."""
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(
                f"a CIFAR batch must hold only numpy arrays, got a call of {module}.{name}; "
                "nothing of it was executed: delete the file and fetch the original"
            )
        return self.ALLOWED[module, name]


def read_pickled_cifar(raw: bytes) -> Split:
    """One file of the Python version: a pickled dict with data (N, 3072) and labels."""
    content = ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
    try:
        fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        labels = fields["fine_labels"] if "fine_labels" in fields else fields["labels"]
        return fields["data"].values.reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)
    except (AttributeError, KeyError) as error:
        raise ValueError(
            f"a CIFAR batch must be a dict of data and labels, got {type(content).__name__} "
            f"({error}); fetch the file again"
        ) from None


def read_binary_cifar(raw: bytes, label_bytes: int) -> Split:
    """One file of the binary version: records of label bytes (the last counts) and pixels."""
    if not raw or len(raw) % (label_bytes + 3072):
        raise ValueError(
            f"a binary CIFAR file must be records of {label_bytes + 3072} bytes, "
            f"got {len(raw)} bytes; fetch it again"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, label_bytes + 3072)
    labels = records[:, label_bytes - 1].astype(np.int64)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def crop_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to an eighth of its side (black comes in), mirror every second one."""
    count, _, height, width = images.shape
    pad = height // 8
    top, left = (torch.randint(2 * pad + 1, (count, 1), generator=generator) for _ in range(2))
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.arange(width).expand(count, -1)
    columns = torch.where(mirrored, columns.flip(1), columns) + left
    rows = torch.arange(height) + top
    padded = torch.nn.functional.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
    picked = (torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :])
    return padded[tuple(index.to(images.device) for index in picked)].permute(0, 3, 1, 2)
