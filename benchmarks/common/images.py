"""Images of a classification task: scikit-learn's digits, or a file ``NAME*.npz``.

A file holds uint8 ``train_images`` and ``test_images``, (N, H, W) or (N, H, W, 3), and
``train_labels`` and ``test_labels``; that of Keras for MNIST is read as it is. With torchvision:

    import numpy, torchvision
    train, test = (torchvision.datasets.CIFAR10("data", part, download=True) for part in (1, 0))
    parts = {"train_images": train.data, "train_labels": train.targets}
    numpy.savez("data/cifar10.npz", **parts, test_images=test.data, test_labels=test.targets)
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Split = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (N, channels, height, width), (N,)

DIGITS_HELD_OUT = 360  # of 1797
FILES = ("mnist", "cifar10", "cifar100")
KERAS = {"x_train": "train_images", "y_train": "train_labels"}
KERAS |= {"x_test": "test_images", "y_test": "test_labels"}


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

    Raises FileNotFoundError that says what to put where, and ValueError for a damaged file.
    """
    if name == "digits":
        train, test = _digits()
    else:
        found = sorted(directory.glob(f"{name}*.npz"))
        if not found:
            raise FileNotFoundError(
                f"--data-dir must hold {name}.npz, got {str(directory)!r} without it; "
                "see the top of benchmarks/common/images.py"
            )
        train, test = _npz(found[0])
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
        arrays = {KERAS.get(key, key): file[key] for key in file.files}
    splits = []
    for part in ("train", "test"):
        try:
            images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        except KeyError as error:
            raise ValueError(f"{path.name} must hold {error}, got {sorted(arrays)}") from None
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        splits.append((images, labels.astype(np.int64)))
    return splits[0], splits[1]


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


def auto_augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """AutoAugment's policy for CIFAR-10 (Cubuk et al., 2019), an image at a time; grey comes in."""
    from torchvision import transforms  # for this preset only

    policy = transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10, fill=[128.0] * 3)
    with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        return torch.stack([policy(image) for image in images])
