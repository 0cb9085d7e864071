"""Muon on the manifold: an MLP of which every weight stays orthonormal, by four optimizers.

    python examples/manifold_muon.py                  scikit-learn's digits, a minute or two
    python examples/manifold_muon.py cifar10.npz      train_images, train_labels, test_images, ...

The network is that of Bernstein, "Modular Manifolds" (2025): layers 128, 64 and 10 wide without
biases, few epochs, a rate that falls to zero. Adam and Muon train it freely, StiefelAdam and
StiefelMuon with orthonormal weights; each at its best rate of the same seven.
"""

import itertools
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stiefel_opt as so

SEEDS = 3
RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
METHODS = {  # what moves the weights, and whether they are constrained
    "Adam": (torch.optim.Adam, False),
    "Muon": (lambda weights, lr: torch.optim.Muon(weights, lr, weight_decay=0.0), False),
    "StiefelAdam": (so.StiefelAdam, True),
    "StiefelMuon": (so.StiefelMuon, True),
}

if sys.argv[1:]:
    file = np.load(sys.argv[1])
    x, y, test_x, test_y = (torch.tensor(file[name]) for name in list(file))
    x, test_x, size, epochs = x.flatten(1), test_x.flatten(1), 1024, 5
else:
    from sklearn.datasets import load_digits

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    x, y, test_x, test_y = images[:1440], labels[:1440], images[1440:], labels[1440:]
    size, epochs = 128, 10
mean, deviation = x.float().mean(), x.float().std()
x, test_x = (x.float() - mean) / deviation, (test_x.float() - mean) / deviation


def train(rule, is_constrained, rate, seed):
    """Return training loss, test accuracy, extreme singular values, milliseconds a step."""
    torch.manual_seed(seed)
    layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise((x.size(1), 128, 64, 10))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    if is_constrained:
        for layer in layers:
            so.constrain(layer)
    optimizer = rule(model.parameters(), lr=rate)
    steps, seconds = epochs * (len(x) // size), 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for batch in itertools.chain(*(torch.randperm(len(x)).split(size) for _ in range(epochs))):
        if len(batch) == size:
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch].long()).backward()
            start = time.perf_counter()
            optimizer.step()
            seconds += time.perf_counter() - start
            schedule.step()
    with torch.no_grad():
        values = torch.cat([torch.linalg.svdvals(layer.weight) for layer in layers])
        right = (model(test_x).argmax(1) == test_y).float().mean()
        loss = cross_entropy(model(x), y.long())
    return [float(loss), float(right), *map(float, values.aminmax()), 1e3 * seconds / steps]


for name, method in METHODS.items():
    runs = {rate: [train(*method, rate, seed) for seed in range(SEEDS)] for rate in RATES}
    best = min(RATES, key=lambda rate: statistics.mean(run[0] for run in runs[rate]))
    loss, right, low, high, ms = map(statistics.mean, zip(*runs[best], strict=True))
    print(f"{name}: rate {best:g}, training loss {loss:.4f}, {100 * right:.1f}% of the test images")
    print(f"    singular values {low:.3f} to {high:.3f}, {ms:.1f} ms a step", flush=True)
