"""Orthonormal weights beside unconstrained ones: learning rates, the time of a step, components.

    pip install matplotlib scikit-learn tqdm
    python examples/demo.py         # two minutes on two cores, no download

1. A vision transformer with orthonormal queries and keys in each head, trained by StiefelAdamW, and
   the same network without the constraint, trained by AdamW, at four learning rates.
2. One training step of an orthogonal layer: torch's parametrization, and the tag of this package.
3. Ten principal components of the digits, by StiefelLBFGS and by StiefelSGD with their defaults.
"""

import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn

import stiefel_opt as so

try:
    import matplotlib
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}; run: pip install matplotlib scikit-learn tqdm")

RATES = (0.001, 0.003, 0.01, 0.03)
METHODS = {"AdamW": "#000000", "StiefelAdamW": "#D55E00"}
WIDTH, HEADS, LAYERS, BATCH, TRAINED = 48, 4, 3, 40, 1200

# ---- a vision transformer over learning rates ----------------------------------------------------


class VisionTransformer(nn.Module):
    """8 x 8 pixels as 16 patches of 2 x 2; torch's own encoder; the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.positions
        return self.classifier(self.encoder(tokens).mean(1))


def load_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits, 1200 to train and 597 to test; the seed decides which."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return images[:TRAINED], labels[:TRAINED], images[TRAINED:], labels[TRAINED:]


def train(
    method: str,
    rate: float,
    seed: int,
    epochs: int,
) -> dict[str, float]:
    """Train along a cosine; return the test error in per cent and the loss of the last epoch."""
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = load_data(seed)
    torch.manual_seed(seed)
    model = VisionTransformer()
    if method == "AdamW":
        rule: Any = torch.optim.AdamW
    else:
        rule = so.StiefelAdamW
        so.constrain_attention(model, "within")  # the queries and keys of each head, in one call
    optimizer = rule(model.parameters(), lr=rate)
    steps = epochs * math.ceil(TRAINED / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[float] = []
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        losses = []
        for chosen in torch.randperm(TRAINED, generator=order).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        wrong = (model(test_images).argmax(1) != test_labels).float().mean().item()
    return {"error": 100 * wrong, "loss": statistics.fmean(losses)}


def over_rates(epochs: int, seeds: int) -> dict[str, list[list[float]]]:
    """Test errors of each method, a row of seeds for each learning rate; two processes."""
    errors = {method: [[math.nan] * seeds for _ in RATES] for method in METHODS}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(2, multiprocessing.cpu_count()), context) as pool:
        waiting = {
            pool.submit(train, method, rate, seed, epochs): (method, place, seed)
            for seed in range(seeds)
            for place, rate in enumerate(RATES)
            for method in METHODS
        }
        done = as_completed(waiting)
        for run in tqdm(done, "networks", len(waiting), unit="network", ncols=80):
            method, place, seed = waiting[run]
            errors[method][place][seed] = run.result()["error"]
    return errors


def table(errors: dict[str, list[list[float]]]) -> str:
    """Test errors by learning rate: mean and, in brackets, the seeds."""
    lines = ["learning rate".ljust(16) + "".join(f"{rate:g}".rjust(18) for rate in RATES)]
    for method, rows in errors.items():
        cells = [f"{statistics.fmean(r):.1f} ({min(r):.1f}-{max(r):.1f})" for r in rows]
        lines.append(method.ljust(16) + "".join(cell.rjust(18) for cell in cells))
    return "\n".join(lines)


# benchmarks/results/vit_digits.json: everything tuned, on other seeds than reported.
TUNED = (
    "Few seeds cannot tell which is better once tuned. Ten seeds with tuned learning rate, weight "
    "decay and dropout gave 4.1 % for StiefelAdamW and 5.2 % for AdamW, 1.12 ± 0.56 apart: level; "
    "and 5.0 % for NAdam, which has Nesterov's momentum too."
)


def plot(errors: dict[str, list[list[float]]], path: Path) -> None:
    """Test error over learning rate, each seed a dot, the mean a line."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for method, rows in errors.items():
        color = METHODS[method]
        axis.plot(RATES, [statistics.fmean(row) for row in rows], color=color, label=method)
        for rate, row in zip(RATES, rows, strict=True):
            axis.plot([rate] * len(row), row, "o", color=color, markersize=4)
    axis.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="test error (%)")
    axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axis.minorticks_off()
    axis.set_yticks([3, 5, 10, 20], ["3", "5", "10", "20"])
    axis.set_title("A vision transformer of 1,200 digits")
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


# ---- one orthogonal layer ------------------------------------------------------------------------


def step_times(size: int = 256, rounds: int = 12) -> dict[str, list[float]]:
    """Seconds of forward, backward and step of an orthogonal layer, the two in turn."""
    torch.manual_seed(0)
    inputs = torch.randn(64, size)
    torchs = nn.utils.parametrizations.orthogonal(nn.Linear(size, size))
    tagged = so.constrain(nn.Linear(size, size), "weight")
    contestants = {
        "torch": (torchs, torch.optim.AdamW(torchs.parameters())),
        "tag": (tagged, so.StiefelAdamW(tagged.parameters())),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, (layer, optimizer) in contestants.items():
            begun = time.perf_counter()
            optimizer.zero_grad()
            layer(inputs).square().mean().backward()
            optimizer.step()
            if turn >= 2:  # the first ones set up
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def faster(seconds: dict[str, list[float]]) -> list[float]:
    """How many times as long torch's parametrization takes, in each round."""
    return [a / b for a, b in zip(seconds["torch"], seconds["tag"], strict=True)]


# ---- principal components ------------------------------------------------------------------------


def components(rule: Any, count: int = 10) -> tuple[int, float]:
    """Evaluations of the loss, and how far the variance is from that of an exact method."""
    pixels = torch.tensor(load_digits().data)
    pixels = pixels - pixels.mean(0)
    exact = torch.linalg.svdvals(pixels)[:count].square().sum()
    start = so.random_point(64, count, generator=torch.Generator().manual_seed(0))
    basis = so.ManifoldParameter(start.to(pixels.dtype))
    optimizer, evaluations, gap = rule([basis]), 0, math.inf

    def loss() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        kept = (pixels @ basis).square().sum() / len(pixels)
        (-kept).backward()
        return -kept

    while gap > 1e-10 and evaluations < 300:
        optimizer.step(loss)
        gap = (1 - (pixels @ basis.detach()).square().sum() / exact).item()
    return evaluations, gap


def main(epochs: int = 15, seeds: int = 2, folder: Path = Path("runs")) -> None:
    """Measure all three and print what came out."""
    torch.set_num_threads(1)
    print(
        f"1. A vision transformer learns {TRAINED} digits in {epochs} epochs: AdamW without a "
        "constraint,\n   StiefelAdamW with orthonormal queries and keys in each head."
    )
    errors = over_rates(epochs, seeds)
    print(f"\nTest error in per cent\n{table(errors)}\n\n{fill(TUNED, 96)}")
    plot(errors, folder / "demo.png")
    print(f"Plot: {folder / 'demo.png'}\n")
    print("2. Forward, backward and step of one orthogonal 256 x 256 layer, one thread.\n")
    seconds = step_times()
    ratios = faster(seconds)
    middle = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    print(f"torch.nn.utils.parametrizations.orthogonal, AdamW   {middle['torch']:8.1f} ms")
    print(f"so.constrain, StiefelAdamW                          {middle['tag']:8.1f} ms")
    print(
        f"{statistics.median(ratios):.1f} times faster, in single rounds {min(ratios):.1f} to "
        f"{max(ratios):.1f} times.\n"
    )
    print("3. Ten principal components of the digits, no learning rate chosen.\n")
    gaps = {}
    for rule in (so.StiefelLBFGS, so.StiefelSGD):
        name = f"so.{rule.__name__}(params)"
        gaps[name] = evaluations, gap = components(rule)
        print(f"{name:24}{evaluations:4} evaluations, variance short of the best by {gap:.0e}")
    content = {"errors": errors, "seconds": seconds, "components": gaps}
    (folder / "demo.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
