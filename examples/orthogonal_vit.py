"""Train a vision transformer with orthonormal queries and keys beside one that is free.

    pip install "stiefel-opt[examples]"
    python examples/orthogonal_vit.py       # a minute on one core, no download

Three methods, two seeds each: AdamW on the free model; StiefelAdam and StiefelSGD on the model
whose query and key weights are orthonormal within every head, after Kong, Wang & Tao (ICLR 2023).
The experiments of the paper, with its 16 methods, are in benchmarks/papers/kong/orthogonal_vit.py.
"""

import math
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import stiefel_opt as so

try:
    import matplotlib
    import numpy as np
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}; run: pip install 'stiefel-opt[examples]'")

WIDTH, HEADS, LAYERS, BATCH, SMOOTHING = 64, 4, 2, 32, 0.1
METHODS = {"AdamW": "#000000", "StiefelAdam": "#D55E00", "StiefelSGD": "#0072B2"}
Curve = list[dict[str, float]]  # one entry an epoch


class VisionTransformer(nn.Module):
    """8 x 8 pixels as four patches of 4 x 4 and a class token; torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=4, stride=4)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        return self.classifier(self.encoder(tokens + self.positions)[:, 0])

    @torch.no_grad()
    def singular_values(self) -> Tensor:
        """Of the query and key weights of every head."""
        fused = torch.stack([layer.self_attn.in_proj_weight for layer in self.encoder.layers])
        heads = fused[:, : 2 * WIDTH].unflatten(1, (2 * HEADS, -1))
        return torch.linalg.svdvals(heads)


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits, normalised; a random fifth is held out for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    train, test = order[360:], order[:360]
    images = (images - images[train].mean()) / images[train].std()
    return images[train], labels[train], images[test], labels[test]


def build(method: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, constrained or not, and one optimizer for all of it; rates as published."""
    model = VisionTransformer()
    if method == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.2)
    so.constrain_attention(model, "within")  # the queries and keys of every head, in one call
    if method == "StiefelAdam":
        return model, so.StiefelAdam(so.param_groups(model, lr=1e-3), weight_decay=5e-5)
    groups = so.param_groups(model, lr=0.15 * BATCH / 128)  # the published rate is for 128 images
    return model, so.StiefelSGD(groups, momentum=0.9, weight_decay=5e-5)


def train(
    method: str, seed: int, epochs: int, data: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Curve:
    """Train with one epoch of warm-up and a cosine; measure after every epoch."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    model, optimizer = build(method)
    steps = math.ceil(len(images) / BATCH)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / steps, total_iters=steps)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    schedule = torch.optim.lr_scheduler.ChainedScheduler([warm_up, cosine])
    loss_of = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    curve: Curve = []
    progress = tqdm(range(epochs), desc=f"{method}, seed {seed}", unit="epoch", ncols=80)
    for _ in progress:
        model.train()
        losses = []
        for picked in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            loss = loss_of(model(images[picked]), labels[picked])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            wrong = (model(test_images).argmax(1) != test_labels).float().mean().item()
        values = model.singular_values()
        measured = {"loss": statistics.fmean(losses), "error": 100 * wrong}
        measured |= {"smallest": values.min().item(), "largest": values.max().item()}
        if method != "AdamW":
            measured["orthonormality"] = so.orthonormality_error(model).item()
        curve.append(measured)
        progress.set_postfix_str(f"test error {measured['error']:.1f} %")
    return curve


def table(curves: dict[str, list[Curve]]) -> str:
    """What holds after the last epoch: means over the seeds, worst orthonormality."""
    lines = [f"{'':14}test error   training loss   singular values of q and k   |WW' - I|"]
    for method, runs in curves.items():
        last = [run[-1] for run in runs]
        mean = {key: statistics.fmean(entry[key] for entry in last) for key in last[0]}
        spread = f"{mean['smallest']:.3f} to {mean['largest']:.3f}"
        error = f"{mean['orthonormality']:.0e}" if "orthonormality" in mean else "-"
        lines.append(
            f"{method:14}{mean['error']:8.2f} %{mean['loss']:16.3f}{spread:>29}{error:>12}"
        )
    return "\n".join(lines)


def conclusion(curves: dict[str, list[Curve]], images: int) -> str:
    """All three methods in one sentence, in images."""
    means = {m: statistics.fmean(run[-1]["error"] for run in runs) for m, runs in curves.items()}
    wrong = {method: images * mean / 100 for method, mean in means.items()}
    listed = ", ".join(f"{method} {count:.1f}" for method, count in wrong.items())
    apart = max(wrong.values()) - min(wrong.values())
    return (
        f"Wrong of {images} test images, mean of {len(next(iter(curves.values())))} seeds: "
        f"{listed}.\nThey lie {apart:.1f} images apart: the constraint is kept to rounding at "
        "about the same accuracy;\nso few seeds and images cannot say which method is better.\n\n"
        f"The training loss cannot fall below 0.50: label smoothing of {SMOOTHING} asks for a "
        "probability of 0.91\nof the right digit, not of 1, and a network that is surer pays."
    )


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """Test error, and between which values the singular values of queries and keys lie."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for method, runs in curves.items():
        epochs = range(1, len(runs[0]) + 1)
        rows = {key: np.array([[e[key] for e in run] for run in runs]) for key in runs[0][0]}
        left.plot(epochs, rows["error"].mean(0), color=METHODS[method], label=method)
        low, high = rows["smallest"].min(0), rows["largest"].max(0)
        right.fill_between(epochs, low, high, color=METHODS[method], alpha=0.2, linewidth=0)
        line = "--" if method == "StiefelSGD" else "-"  # it lies on that of StiefelAdam
        right.plot(epochs, np.stack([low, high], 1), color=METHODS[method], linestyle=line)
    left.set(xlabel="epoch", ylabel="test error (%)", ylim=(0, 20), title="Held-out digits")
    right.set(xlabel="epoch", ylabel="singular values of q and k", ylim=(0, None))
    right.set_title("Smallest and largest of any head")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def main(epochs: int = 25, seeds: int = 2, path: Path = Path("runs/demo.png")) -> None:
    """Train all, print the table and what it says, draw the curves."""
    torch.set_num_threads(1)
    data = load_data()
    print(
        f"A vision transformer learns {len(data[0])} small digits in {epochs} epochs, from {seeds} "
        "seeds each:\nAdamW on free weights; StiefelAdam and StiefelSGD with orthonormal queries "
        "and keys."
    )
    curves: dict[str, list[Curve]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        for method, runs in curves.items():
            runs.append(train(method, seed, epochs, data))
    print(f"\n{table(curves)}\n\n{conclusion(curves, len(data[2]))}")
    plot(curves, path)
    print(f"Plot: {path}, test error and singular values over the epochs")


if __name__ == "__main__":
    main()
