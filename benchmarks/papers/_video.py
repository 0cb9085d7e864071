"""For the video example: moving digits, KTH, a ConvLSTM, memory of a step, strip of frames."""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import figures, require
from _images import load_images
from _training import Trainer
from torch import Tensor, nn

HELD_OUT = {"valid": 24, "test": 64}  # clips
SHOWN = 8  # frames in the strip, the last ones
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


def load_clips(options: Namespace) -> Mapping[str, Any]:
    """ "train": a function of count and generator; "valid" and "test": (T, clips, side, side)."""
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

    held_out = torch.Generator().manual_seed(2**31)
    valid = draw(HELD_OUT["valid"], held_out)
    return {"train": draw, "valid": valid, "test": draw(HELD_OUT["test"], held_out, test)}


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
    """Windows of the videos, split by person as published."""
    videos: dict[str, list[np.ndarray]] = {part: [] for part in PERSONS}
    for path in sorted(options.data_dir.glob("person*.npz")):
        found = re.match(r"person(\d+)", path.name)
        with np.load(path, allow_pickle=False) as file:
            frames = file["frames"]
        if frames.shape[1:] != (options.side, options.side) or frames.dtype != np.uint8:
            raise SystemExit(
                f"frames must be uint8 of shape (T, {options.side}, {options.side}), got "
                f"{frames.dtype} of {frames.shape} in {path.name}; set --side or convert again"
            )
        for part, persons in PERSONS.items():
            if found and int(found[1]) in persons and len(frames) >= options.frames:
                videos[part].append(frames)
    if not all(videos.values()):
        raise SystemExit(
            f"--data-dir must hold person01_....npz to person25_....npz with at least "
            f"{options.frames} frames, got {options.data_dir}; "
            f"see the top of benchmarks/papers/video.py"
        )

    def draw(count: int, generator: torch.Generator, part: str = "train") -> Tensor:
        clips = []
        for which in torch.randint(len(videos[part]), (count,), generator=generator).tolist():
            video = videos[part][which]
            last = len(video) - options.frames + 1
            start = int(torch.randint(last, (), generator=generator))
            clips.append(torch.from_numpy(video[start : start + options.frames]))
        return torch.stack(clips, dim=1).float() / 255

    held_out = torch.Generator().manual_seed(2**31)
    fixed = {part: draw(count, held_out, part) for part, count in HELD_OUT.items()}
    return {"train": draw, **fixed}


def live_bytes(build: Callable[[], Trainer]) -> int:
    """Bytes that a forward keeps for its backward, with parameters and optimizer's state.

    Tensors saved by autograd are counted once for each storage. Works on every device alike;
    buffers inside one operation are not seen.
    """
    trainer = build()
    (batch, *_) = trainer.task.batches(torch.Generator().manual_seed(0))
    trainer.step(batch)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = trainer.task.loss(batch)
    for parameter in trainer.model.parameters():
        note(parameter)
        note(parameter if parameter.grad is None else parameter.grad)
    for state in trainer.optimizer.state_dict().values():
        for tensor in tensors(state):
            note(tensor)
    del loss
    return sum(storages.values())


def tensors(state: Any) -> list[Tensor]:
    """All tensors in nested dicts and lists."""
    if isinstance(state, Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state
    return [t for part in inner for t in tensors(part)] if isinstance(state, dict | list) else []


def plot_strip(path: Path, rows: Mapping[str, Tensor]) -> None:
    """The last frames of one clip, a row for each name."""
    require("matplotlib").use("Agg")
    from matplotlib import pyplot

    length = min(map(len, rows.values()))
    shown = range(length)[-SHOWN:]
    size = (1.1 * len(shown) + 1.2, 1.15 * len(rows))
    figure, axes = pyplot.subplots(len(rows), len(shown), figsize=size, squeeze=False)
    for line, (title, frames) in zip(axes, rows.items(), strict=True):
        for axis, place in zip(line, shown, strict=True):
            axis.imshow(frames[place].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=8)
    for axis, place in zip(axes[0], shown, strict=True):
        axis.set_title(f"frame {place + 2}", fontsize=8)
    figure.subplots_adjust(0.18, 0.01, 0.99, 0.95, 0.05, 0.05)
    figures.save(figure, path)
