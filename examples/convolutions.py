"""A network that cannot be fooled by small changes: every layer is orthonormal, so no layer can
enlarge the distance between two images, and a margin between classes is a guarantee.

    pip install scikit-learn
    python examples/convolutions.py         # a few seconds on one core
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn

import stiefel_opt as so

EPOCHS = 15
RADIUS = 0.2


def network() -> nn.Sequential:
    """Kernels as wide as their stride, so that an orthonormal kernel is an orthonormal layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=2, stride=2),  # 8 x 8 pixels to 4 x 4
        nn.ReLU(),
        nn.Conv2d(16, 64, kernel_size=2, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, kernel_size=2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def stretch(model: nn.Module) -> float:
    """A bound on how much the network can enlarge a distance: the product of the spectral norms."""
    weights = [weight.detach().flatten(1) for weight in model.parameters() if weight.ndim > 1]
    return math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)


def train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(EPOCHS):
        for picked in torch.randperm(len(train_images)).split(32):
            optimizer.zero_grad()
            logits = model(train_images[picked])
            nn.functional.cross_entropy(10 * logits, train_labels[picked]).backward()
            optimizer.step()
    with torch.no_grad():
        two = model(test_images).topk(2)
    right = two.indices[:, 0] == test_labels
    # A change of length r moves the difference of two logits by at most sqrt(2) * stretch * r.
    safe = right & (two.values[:, 0] - two.values[:, 1] > math.sqrt(2) * stretch(model) * RADIUS)
    print(f"{name:13}{right.float().mean():8.1%}{stretch(model):20.4g}{safe.float().mean():24.1%}")


torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_images, test_images = images[:1437], images[1437:]
train_labels, test_labels = labels[:1437], labels[1437:]

print(f"{'':13}{'right':>8}{'largest stretch':>20}{f'safe at length {RADIUS}':>24}")
torch.manual_seed(0)
model = network()
for layer in model:
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        so.constrain(layer)  # a kernel is read as out_channels x (in_channels * 2 * 2)
train("StiefelAdam", model, so.StiefelAdam(model.parameters(), lr=3e-3))
torch.manual_seed(0)
free = network()
train("Adam", free, torch.optim.Adam(free.parameters(), lr=3e-3))
print(f"""
{so.report(model)}

What to see: fewer digits right, but for most of them a proof that no change of the image of
length {RADIUS} (pixels are 0 to 1) turns the answer. For the other network nothing is proved.""")
