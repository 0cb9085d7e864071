"""Muon on the manifold: an MLP of which every weight stays orthonormal, by five optimizers.

    python examples/manifold_muon.py                  scikit-learn's digits, some minutes
    python examples/manifold_muon.py cifar10.npz      train_images, train_labels, test_images, ...

The network is that of Bernstein, "Modular Manifolds" (2025): three layers, five epochs, a rate that
falls to zero. Adam and Muon train it freely, the others orthonormal; each at its best of 7 rates.
"""

import itertools
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

import stiefel_opt as so

SEEDS = 3
RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
METHODS = {  # what moves the weights, and whether they are constrained
    "Adam": (torch.optim.Adam, False),
    "Muon": (lambda weights, lr: torch.optim.Muon(weights, lr, weight_decay=0.0), False),
    "StiefelSGD": (lambda weights, lr: so.StiefelSGD(weights, lr, momentum=0.9), True),
    "StiefelAdam": (so.StiefelAdam, True),
    "StiefelMuon": (so.StiefelMuon, True),
}


def load(*paths):
    """Return training images and labels, test images and labels, and the size of a batch."""
    if paths:
        x, y, test_x, test_y = map(torch.tensor, np.load(paths[0]).values())
    else:
        from sklearn.datasets import load_digits

        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        x, y, test_x, test_y = images[:1440], labels[:1440], images[1440:], labels[1440:]
    x, test_x = x.flatten(1).float(), test_x.flatten(1).float()
    mean, scale = x.mean(), x.std()
    return (x - mean) / scale, y, (test_x - mean) / scale, test_y, 1024 if paths else 128


def train(data, name, rate, seed, epochs=5):
    """Return training loss, test accuracy, extreme singular values, milliseconds a step."""
    x, y, test_x, test_y, size = data
    rule, is_constrained = METHODS[name]
    torch.manual_seed(seed)
    layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise((x.size(1), 128, 64, 10))]
    if is_constrained:
        layers = [so.constrain(layer) for layer in layers]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimizer = rule(model.parameters(), lr=rate)
    steps, seconds = epochs * (len(x) // size), []
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for batch in itertools.chain(*(torch.randperm(len(x)).split(size) for _ in range(epochs))):
        if len(batch) == size:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch].long()).backward()
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            schedule.step()
    with torch.no_grad():
        values = torch.cat([torch.linalg.svdvals(layer.weight) for layer in layers]).aminmax()
        right = (model(test_x).argmax(1) == test_y).float().mean()
        loss = nn.functional.cross_entropy(model(x), y.long())
    return [*map(float, (loss, right, *values)), 1e3 * statistics.median(seconds)]


if __name__ == "__main__":
    data = load(*sys.argv[1:])
    for name in METHODS:
        runs = {rate: [train(data, name, rate, seed) for seed in range(SEEDS)] for rate in RATES}
        best = min(RATES, key=lambda rate: statistics.mean(run[0] for run in runs[rate]))
        loss, right, low, high, ms = map(statistics.mean, zip(*runs[best], strict=True))
        print(f"{name}, learning rate {best:g}: training loss {loss:.4f}, {right:.1%} right")
        print(f"    singular values {low:.3f} to {high:.3f}, {ms:.1f} ms a step", flush=True)
