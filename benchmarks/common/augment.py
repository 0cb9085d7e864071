"""AutoAugment's policy for CIFAR-10 (Cubuk et al., 2019) on batches of uint8 images, in torch.

Each image gets one of 25 pairs of operations, each operation with its own probability and
magnitude. Table, ranges and the grey that comes in are those of the implementation that Kong, Wang
& Tao name (DeepVoltaire/AutoAugment; torchvision has the same table): the sign of a shift, shear or
change of colour is random, a turn is always to the left.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

GREY = 128.0
# Operation, probability, magnitude of 0 to 9.
POLICY = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear y", 0.5, 8), ("translate y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("color", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate y", 0.9, 9), ("translate y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate y", 0.7, 9), ("autocontrast", 0.9, 1)),
)


def auto_augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Augment uint8 images (batch, 3, side, side); returns new ones."""
    count = len(images)
    images, device = images.float(), images.device
    chosen = torch.randint(len(POLICY), (count,), generator=generator).to(device)
    for place in range(2):
        chance = torch.rand(count, generator=generator).to(device)
        signs = (torch.randint(2, (count,), generator=generator) * 2 - 1).to(images)
        result = images.clone()
        for number, pair in enumerate(POLICY):
            name, probability, magnitude = pair[place]
            picked = (chosen == number) & (chance < probability)
            if picked.any():
                result[picked] = operate(name, images[picked], magnitude / 9, signs[picked])
        images = result
    return images.to(torch.uint8)


def operate(name: str, images: Tensor, amount: float, signs: Tensor) -> Tensor:
    """One operation, ``amount`` in [0, 1], on whole numbers of 0 to 255 kept as floats."""
    if name in MOVES:
        sizes = amount * (torch.ones_like(signs) if name == "rotate" else signs)
        return moved(images, MOVES[name](sizes), "bicubic" if name == "shear y" else "nearest")
    if name in DULL:
        factor = (1 + 0.9 * amount * signs)[:, None, None, None]
        dull = DULL[name](images)
        return (dull + factor * (images - dull)).clamp(0, 255).floor()
    if name == "posterize":
        step = 2 ** round(4 * amount)
        return (images / step).floor() * step
    if name == "solarize":
        return torch.where(images < 256 * (1 - amount), images, 255 - images)
    if name == "invert":
        return 255 - images
    return stretched(images) if name == "autocontrast" else equalized(images)


def moved(images: Tensor, entries: tuple[Tensor | float, ...], mode: str) -> Tensor:
    """Look up each pixel at an affine image of its place, both in [-1, 1]; grey comes in."""
    columns = [torch.as_tensor(entry).to(images).expand(len(images)) for entry in entries]
    grid = torch.nn.functional.affine_grid(
        torch.stack(columns, 1).unflatten(1, (2, 3)), list(images.shape), align_corners=False
    )
    found = torch.nn.functional.grid_sample(
        images, grid, mode=mode, padding_mode="border", align_corners=False
    )
    inside = (grid.abs() < 1).all(-1)[:, None]
    return torch.where(inside, found.round().clamp(0, 255), GREY)


def turn(amounts: Tensor) -> tuple[Tensor | float, ...]:
    angles = amounts * math.radians(30)
    return angles.cos(), -angles.sin(), 0, angles.sin(), angles.cos(), 0


SHIFT = 2 * 150 / 331  # the largest, in a picture that is 2 wide
MOVES: dict[str, Callable[[Tensor], tuple[Tensor | float, ...]]] = {
    "shear y": lambda amounts: (1, 0, 0, 0.3 * amounts, 1, 0.3 * amounts),  # about the corner
    "translate x": lambda amounts: (1, 0, SHIFT * amounts, 0, 1, 0),
    "translate y": lambda amounts: (1, 0, 0, 0, 1, SHIFT * amounts),
    "rotate": turn,
}


def grey(images: Tensor) -> Tensor:
    weights = images.new_tensor([0.299, 0.587, 0.114])[:, None, None]
    return (images * weights).sum(1, keepdim=True).round()


def smooth(images: Tensor) -> Tensor:
    """Each inner pixel's average with its neighbours, itself counted five times."""
    kernel = images.new_ones(3, 1, 3, 3)
    kernel[:, :, 1, 1] = 5
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = torch.nn.functional.conv2d(images, kernel / 13, groups=3).round()
    return result


# What the colours are moved away from, or towards.
DULL: dict[str, Callable[[Tensor], Tensor]] = {
    "brightness": torch.zeros_like,
    "color": grey,
    "contrast": lambda images: grey(images).mean((1, 2, 3), keepdim=True).round(),
    "sharpness": smooth,
}


def stretched(images: Tensor) -> Tensor:
    """Every channel from 0 to 255; one of a single level stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    wide = ((images - low) * (255 / (high - low).clamp(min=1))).floor()
    return torch.where(high > low, wide, images)


def equalized(images: Tensor) -> Tensor:
    """Every channel with about as many pixels of each level; one of a single level stays."""
    levels = images.flatten(2).long()
    counts = torch.zeros(*levels.shape[:2], 256, device=images.device, dtype=torch.long)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    last = counts.gather(2, levels.amax(2, keepdim=True))
    step = (levels.size(2) - last) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.gather(2, levels).unflatten(2, images.shape[2:]).float()
