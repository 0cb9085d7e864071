"""A proof for each image of how far its answer cannot change: a network of isometries.

    pip install scikit-learn matplotlib
    python examples/certified.py         # under a minute on one core; writes certified.png

The block is LipNeXt's (ICLR 2026): a learned position, a rotation R, a shift of channels by a
pixel, R back and a mix M; absolute values of half of the channels. M R' is one orthonormal matrix,
so R back costs nothing.
"""

import math

import matplotlib
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stiefel_opt as so

matplotlib.use("Agg")
from matplotlib import pyplot

STEPS = 600
WIDTH = 64
RADII = [k / 20 for k in range(41)]  # lengths of a change of the whole image, pixels from 0 to 1
ATTACKED = 0.75


class Position(nn.Module):
    """x + p: a number for each channel and pixel, so that a pixel knows where it is."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position


def mix(entering: int, leaving: int) -> nn.Module:
    """An orthonormal matrix on the channels of each pixel."""
    return so.constrain(nn.Conv2d(entering, leaving, 1))


def block(width: int, side: int) -> list[nn.Module]:
    before = [Position(width, side, side), mix(width, width), so.nn.SpatialShift()]
    return [*before, mix(width, width), so.nn.BetaAbs()]


def certified_network() -> nn.Sequential:
    return nn.Sequential(
        nn.PixelUnshuffle(2),  # 8 x 8 pixels to 4 x 4 of 4 channels
        mix(4, WIDTH),
        so.nn.BetaAbs(),
        *block(WIDTH, 4),
        *block(WIDTH, 4),
        nn.Flatten(),
        so.nn.NormalizedLinear(16 * WIDTH, 10),  # a unit vector for each class
    )


def ordinary_network() -> nn.Sequential:
    layers = [nn.PixelUnshuffle(2), nn.Conv2d(4, WIDTH, 1), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * WIDTH, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: nn.Module) -> None:
    rate = optimizer.param_groups[0]["lr"]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * step / STEPS)) / 2
        chosen = torch.randint(len(train_labels), (64,))
        optimizer.zero_grad()
        loss(model(train_images[chosen]), train_labels[chosen]).backward()
        optimizer.step()


def attacked(model: nn.Module, radius: float, steps: int = 20) -> float:
    """Share that stays right under projected gradient descent on the margin, in the 2-norm."""

    def unit(v: Tensor) -> Tensor:
        return nn.functional.normalize(v.flatten(1), dim=1).view_as(v)

    with torch.no_grad():
        right = model(test_images).argmax(1) == test_labels
    move = 0.5 * radius * unit(torch.randn_like(test_images))
    for _ in range(steps):
        move.requires_grad_()
        logits = model(test_images + move)
        right &= logits.argmax(1) == test_labels
        others = logits.scatter(1, test_labels[:, None], -math.inf).amax(1)
        margin = logits.gather(1, test_labels[:, None]).squeeze(1) - others
        (slope,) = torch.autograd.grad(margin.sum(), move)
        move = (move - 0.25 * radius * unit(slope)).detach()
        length = move.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        move = move * (radius / length.clamp_min(1e-12)).clamp_max(1.0)
    with torch.no_grad():
        return float((right & (model(test_images + move).argmax(1) == test_labels)).float().mean())


torch.set_num_threads(1)
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train_images, test_images = images[order[:1437]], images[order[1437:]]
train_labels, test_labels = labels[order[:1437]], labels[order[1437:]]

model = certified_network()
train(model, so.StiefelAdam(model.parameters(), lr=0.01), so.nn.MarginCrossEntropy(offset=1.0))
ordinary = ordinary_network()
train(ordinary, torch.optim.Adam(ordinary.parameters(), lr=0.003), nn.CrossEntropyLoss())

print("Factors of the bound, layer by layer:")
for name, factor in so.lipschitz_table(model, input_size=(1, 8, 8)).items():
    print(f"  {name:8}{type(model.get_submodule(name.split('.')[0])).__name__:20}{factor:.7f}")
body, bound = so.lipschitz_bound(model[:-1], (1, 8, 8)), so.lipschitz_bound(ordinary, (1, 8, 8))
print(f"bound up to the last layer {body:.7f}; of the ordinary network {bound:.3g}")

test = [(test_images, test_labels)]
proven = so.certified_accuracy(model, test, RADII)
kept = {radius: attacked(model, radius) for radius in (0.0, ATTACKED, 1.5)}
broken = {
    radius: attacked(ordinary, radius) for radius in (0.0, 0.25, 0.5, ATTACKED, 1.0, 1.5, 2.0)
}
print(f"right: {proven[0]:.1%}, ordinary network {broken[0.0]:.1%}")
print(f"right by proof within {ATTACKED}: {proven[ATTACKED]:.1%}")
print(
    f"right under attack within {ATTACKED}: {kept[ATTACKED]:.1%}, ordinary {broken[ATTACKED]:.1%}"
)

pyplot.figure(figsize=(6, 4))
pyplot.plot(RADII, [100 * proven[radius] for radius in RADII], label="certified: a proof")
pyplot.plot(list(kept), [100 * share for share in kept.values()], "o", label="the same, attacked")
shares = [100 * share for share in broken.values()]
pyplot.plot(list(broken), shares, "--", label="ordinary network, attacked")
pyplot.xlabel("largest change of an image (2-norm)")
pyplot.ylabel("right, % of 360 digits")
pyplot.legend()
pyplot.tight_layout()
pyplot.savefig("certified.png", dpi=120)
