"""What `video.py` needs: moving digits, KTH, the network, and the memory of a step."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.harness import kept_bytes, state_tensors
from benchmarks.common.images import load_images
from benchmarks.common.training import Trainer
from stiefel_opt.nn import ConvNERU

HELD_OUT = {"valid": 24, "test": 64}  # clips
ACTIONS = ["walking", "jogging", "running", "boxing", "handwaving", "handclapping"]
PERSONS = {"train": range(1, 13), "valid": range(13, 17), "test": range(17, 26)}  # of KTH


class ConvLSTM(nn.Module):
    """LSTM whose states are images and whose products are convolutions (Shi et al., 2015).

    With instance normalization of the products, without which Likhosherstov et al. (AISTATS 2021,
    appendix E) found it worse.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input_conv = nn.Conv2d(inputs, 4 * hidden, 3, padding=1)
        self.hidden_conv = nn.Conv2d(hidden, 4 * hidden, 3, padding=1, bias=False)
        with torch.no_grad():  # gates that begin open remember longer
            self.input_conv.bias[hidden : 2 * hidden] = 1.0
        self.shift = nn.Parameter(self.input_conv.bias.detach().clone())

    def forward(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden images for ``(T, batch, channels, height, width)``, and the last one."""
        normalize = nn.functional.instance_norm
        flat = normalize(self.input_conv(steps.flatten(0, 1)))
        entering = (flat + self.shift[:, None, None]).unflatten(0, steps.shape[:2])
        outputs: list[Tensor] = []
        hidden = cell = torch.zeros_like(entering[0].chunk(4, 1)[0])
        for image in entering:
            # The first hidden image is zero, which has no deviation to be divided by.
            turned = normalize(self.hidden_conv(hidden)) if outputs else 0.0
            enter, keep, new, show = (image + turned).chunk(4, dim=1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = show.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs), hidden


class Method(NamedTuple):
    """How one row keeps the recurrent kernel, and what trains it if tagged."""

    transition: str | None = None
    rule: Callable[..., torch.optim.Optimizer] | None = None
    start: str = ""  # of a free kernel


class Predictor(nn.Module):
    """Frames ``(T, batch, side, side)`` to predictions of the next ones, of the same shape."""

    def __init__(self, method: Method, channels: int, first_stride: int = 1) -> None:
        super().__init__()
        c = channels
        first = (3, 1, 1) if first_stride == 1 else (4, 2, 1)
        widths = (c, 2 * c, 4 * c, 2 * c, c)
        conv, turned = nn.Conv2d, nn.ConvTranspose2d
        self.between = nn.ModuleList(
            [
                conv(4, c, 3, first_stride, 1),
                conv(c, 2 * c, 3, 2, 1),
                conv(2 * c, 4 * c, 3, 2, 1),
                turned(4 * c, 2 * c, 4, 2, 1),
                turned(4 * c, c, 4, 2, 1),  # from a unit and its skip
                (conv if first_stride == 1 else turned)(2 * c, 4, *first),
            ]
        )
        self.recurrent = nn.ModuleList(self.unit(method, width) for width in widths)
        # ConvLSTM as in the paper, where it needed instance normalization and the others not.
        self.normalize = nn.functional.instance_norm if method.start == "lstm" else nn.Identity()

    @staticmethod
    def unit(method: Method, width: int) -> nn.Module:
        """One recurrent unit with as many channels in as out."""
        if method.start == "lstm":
            return ConvLSTM(width, width)
        unit = ConvNERU(width, width, transition=method.transition)
        if method.start == "glorot":
            nn.init.xavier_uniform_(unit.hidden_conv.weight)
        if method.start == "zero":
            unit.hidden_conv.weight.requires_grad_(False).zero_()
        return unit

    def turn(self, level: int, images: Tensor) -> Tensor:
        """The convolution before a unit, at every time."""
        flat = self.normalize(self.between[level](images.flatten(0, 1)))
        return torch.relu(flat).unflatten(0, images.shape[:2])

    def forward(self, frames: Tensor) -> Tensor:
        images, skips = nn.functional.pixel_unshuffle(frames.unsqueeze(2), 2), []
        for level, unit in enumerate(self.recurrent):
            images, _ = unit(self.turn(level, images))
            if level < 2:
                skips.append(images)
            elif level > 2:
                images = torch.cat([images, skips.pop()], dim=2)
        last = self.between[-1](images.flatten(0, 1)).unflatten(0, images.shape[:2])
        return nn.functional.pixel_shuffle(last, 2).squeeze(2)

    def orthonormality_error(self) -> float | None:
        """Largest |q^2 K'K - I| of a recurrent kernel as a matrix; None for a ConvLSTM."""
        errors = [0.0]
        for unit in self.recurrent:
            if not isinstance(unit, ConvNERU):
                return None
            matrix = 3 * unit.hidden_conv.weight.detach().flatten(1)
            errors.append(
                float((matrix @ matrix.mT - torch.eye(len(matrix)).to(matrix)).abs().max())
            )
        return max(errors)


def load_clips(options: Namespace) -> Mapping[str, Any]:
    """ "train": the batches of an epoch, drawn by a generator; "valid", "test": lists of clips.

    Clips are (T, count, side, side).
    """
    if options.data == "kth":
        return kth_clips(options)
    images = load_images(options.data, options.data_dir)
    size = options.side // 2
    pools = []
    for pixels in (images.train_images, images.test_images):
        grey = pixels.float() / pixels.max()
        pools.append(nn.functional.interpolate(grey, (size, size), mode="bilinear").squeeze(1))
    train, test = pools

    def draw(count: int, generator: torch.Generator, pool: Tensor = train) -> Tensor:
        return moving_digits(pool, count, options.frames, options.side, generator)

    def epoch(options: Namespace, generator: torch.Generator) -> Iterator[Tensor]:
        return (draw(options.batch_size, generator) for _ in range(options.steps))

    held_out = torch.Generator().manual_seed(2**31)
    valid = draw(HELD_OUT["valid"], held_out)
    return {"train": epoch, "valid": [valid], "test": [draw(HELD_OUT["test"], held_out, test)]}


def moving_digits(
    pool: Tensor, count: int, frames: int, side: int, generator: torch.Generator
) -> Tensor:
    """Clips (frames, count, side, side) of two digits that bounce off the walls."""
    size = pool.size(-1)
    free = side - size
    picked = torch.randint(len(pool), (count, 2), generator=generator)
    place = torch.rand(count, 2, 2, generator=generator) * 2 * free
    speed = (0.5 + torch.rand(count, 2, 2, generator=generator)) * side / 16
    direction = torch.randint(2, (count, 2, 2), generator=generator) * 2 - 1
    clips = torch.zeros(frames, count, side, side)
    for frame in range(frames):
        unfolded = (place + frame * speed * direction) % (2 * free)  # there and back again
        corners = torch.minimum(unfolded, 2 * free - unfolded).round().long()
        for clip in range(count):
            for digit in range(2):
                top, left = corners[clip, digit].tolist()
                window = clips[frame, clip, top : top + size, left : left + size]
                torch.maximum(window, pool[picked[clip, digit]], out=window)
    return clips


def kth_clips(options: Namespace) -> Mapping[str, Any]:
    """Whole sequences of one action, split by person as in appendix E; sets ``options.steps``."""
    found: dict[str, list[Tensor]] = {part: [] for part in PERSONS}
    for path in sorted(options.data_dir.glob(f"person*_{options.action}_*.npz")):
        with np.load(path, allow_pickle=False) as file:
            frames = file["frames"]
        if frames.shape[1:] != (options.side, options.side) or frames.dtype != np.uint8:
            raise SystemExit(
                f"frames must be uint8 of shape (T, {options.side}, {options.side}), got "
                f"{frames.dtype} of {frames.shape} in {path.name}; set --side or convert again"
            )
        for part, persons in PERSONS.items():
            if int(path.name[6:8]) in persons and len(frames) > 1:
                found[part].append(torch.from_numpy(frames))
    if not all(found.values()):
        raise SystemExit(
            f"--data-dir must hold person01_{options.action}_....npz to person25_....npz, got "
            f"{options.data_dir}; see the top of benchmarks/papers/likhosherstov/video.py"
        )
    size = options.batch_size
    options.steps = -(-len(found["train"]) // size)

    def padded(sequences: list[Tensor]) -> Tensor:
        """The model sees zeros after a shorter sequence; -1 says that no frame is counted there."""
        floats = [sequence.float() / 255 for sequence in sequences]
        return torch.nn.utils.rnn.pad_sequence(floats, padding_value=-1.0)

    def epoch(_: Namespace, generator: torch.Generator) -> Iterator[Tensor]:
        order = torch.randperm(len(found["train"]), generator=generator).tolist()
        for start in range(0, len(order), size):
            yield padded([found["train"][index] for index in order[start : start + size]])

    held_out = {
        part: [padded(found[part][at : at + size]) for at in range(0, len(found[part]), size)]
        for part in ("valid", "test")
    }
    return {"train": epoch, **held_out}


def live_bytes(build: Callable[[], Trainer]) -> int:
    """Bytes that a forward keeps for its backward, with parameters and optimizer's state."""
    trainer = build()
    batch = next(iter(trainer.task.batches(torch.Generator().manual_seed(0))))
    trainer.step(batch)
    parameters = list(trainer.model.parameters())
    own = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    for part in getattr(trainer.optimizer, "parts", [trainer.optimizer]):
        own += state_tensors(part)
    kept, _ = kept_bytes(lambda: trainer.task.loss(batch), own)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in own}
    return kept + sum(storage.nbytes() for storage in storages.values())
