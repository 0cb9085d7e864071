"""A vision transformer at four learning rates: AdamW, NAdam, and orthonormal weights.

    pip install matplotlib scikit-learn tqdm
    python examples/demo.py         # under three minutes on two cores, no download

Three seeds each, 1,200 of scikit-learn's digits to train and 597 to test. The third row begins with
torch's ``nn.init.orthogonal_`` of the matrices of the blocks. The last row is the network after one
line, ``so.constrain_transformer(model)``: every matrix of its blocks has orthonormal columns (rows
if it is wide), by heads, and ``so.StiefelAdamW`` keeps it so.
"""

import json
import math
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

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
INITIALISED = "AdamW, orthogonal"
COLORS = {
    "AdamW": "#000000",
    "NAdam": "#7F7F7F",
    INITIALISED: "#56B4E9",
    "StiefelAdamW": "#D55E00",
}
LABELS = {
    INITIALISED: "AdamW, orthogonal at the beginning",
    "StiefelAdamW": "StiefelAdamW, orthonormal after every step",
}
WIDTH, HEADS, LAYERS, BATCH, TRAINED = 48, 4, 3, 40, 1200


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


def optimizer_of(method: str, model: VisionTransformer, rate: float) -> torch.optim.Optimizer:
    """The optimizer of a method; it initialises or constrains the model if the method says so."""
    if method == INITIALISED:
        for weight in model.encoder.parameters():
            if weight.ndim == 2:
                nn.init.orthogonal_(weight)
    if method.startswith("AdamW"):
        return torch.optim.AdamW(model.parameters(), lr=rate)
    if method == "NAdam":  # torch's default momentum_decay halves the momentum
        return torch.optim.NAdam(
            model.parameters(),
            lr=rate,
            weight_decay=0.01,
            decoupled_weight_decay=True,
            momentum_decay=1e4,
        )
    so.constrain_transformer(model)
    return so.StiefelAdamW(model.parameters(), lr=rate)


def train(method: str, rate: float, seed: int, epochs: int) -> float:
    """Train along a cosine; return the test error in per cent."""
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = load_data(seed)
    torch.manual_seed(seed)
    model = VisionTransformer()
    optimizer = optimizer_of(method, model, rate)
    steps = epochs * math.ceil(TRAINED / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(TRAINED, generator=order).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(test_images).argmax(1) != test_labels).float().mean().item()


def over_rates(epochs: int, seeds: range) -> dict[str, list[list[float]]]:
    """Test errors of each method, a row of seeds for each learning rate; two processes."""
    errors = {method: [[math.nan] * len(seeds) for _ in RATES] for method in COLORS}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(2, multiprocessing.cpu_count()), context) as pool:
        waiting = {
            pool.submit(train, method, rate, seed, epochs): (method, row, column)
            for column, seed in enumerate(seeds)
            for row, rate in enumerate(RATES)
            for method in COLORS
        }
        done = as_completed(waiting)
        for run in tqdm(done, "networks", len(waiting), unit="network", ncols=80):
            method, row, column = waiting[run]
            errors[method][row][column] = run.result()
    return errors


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean of the seeds, and its standard error."""
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), spread / math.sqrt(len(values))


def table(errors: dict[str, list[list[float]]]) -> str:
    """Test errors by learning rate: the mean of the seeds, and its standard error."""
    lines = ["learning rate".ljust(18) + "".join(f"{rate:g}".rjust(14) for rate in RATES)]
    for method, rows in errors.items():
        cells = ["{:.1f} ± {:.1f}".format(*mean_and_error(row)) for row in rows]
        lines.append(method.ljust(18) + "".join(cell.rjust(14) for cell in cells))
    return "\n".join(lines)


def plot(errors: dict[str, list[list[float]]], path: Path) -> None:
    """Test error over learning rate, each seed a dot, the mean a line."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for method, rows in errors.items():
        means = [statistics.fmean(row) for row in rows]
        axis.plot(RATES, means, color=COLORS[method], label=LABELS.get(method, method))
        for rate, row in zip(RATES, rows, strict=True):
            axis.plot([rate] * len(row), row, "o", color=COLORS[method], markersize=4)
    axis.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="test error (%)")
    axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axis.minorticks_off()
    limits = axis.get_ylim()  # of the data: ticks beyond them would widen the axis
    ticks = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.set_ylim(limits)
    axis.set_title("A vision transformer of 1,200 digits")
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


NEXT = """Next:
    {python} examples/pca_procrustes.py    # components and a rotation, in a second
    {python} examples/rnn_memory.py        # a recurrent network that remembers
    make test"""


def main(epochs: int = 15, seeds: range = range(3), folder: Path = Path("runs")) -> None:
    """Train all networks; print the table, save the plot and the numbers."""
    print(
        f"A vision transformer learns {TRAINED} digits in {epochs} epochs, {len(seeds)} seeds:\n"
        "AdamW and NAdam; AdamW after torch's nn.init.orthogonal_ on the matrices of its blocks;\n"
        "and StiefelAdamW, which keeps all of them orthonormal."
    )
    errors = over_rates(epochs, seeds)
    print(f"\nTest error in per cent, mean and standard error\n\n{table(errors)}\n")
    plot(errors, folder / "demo.png")
    print(f"Plot: {(folder / 'demo.png').resolve()}\n")
    print(NEXT.format(python=os.path.relpath(sys.executable)))
    content = json.dumps({"seeds": list(seeds), "rates": RATES, "errors": errors}, indent=1)
    (folder / "demo.json").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
