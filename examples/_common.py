"""Shared by the examples: optional packages, atomic files, tables, plots, the training loop."""

import importlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _images import Images, crop_flip
from torch import Tensor, nn

History = Sequence[Mapping[str, float]]  # one entry an epoch

# Colours that colour-blind readers can tell apart (Okabe & Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")


def require(name: str) -> Any:
    """Import an optional package, or say in one line how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"{name} must be installed, got {error}; run: pip install 'stiefel-opt[examples]'"
        ) from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path, renamed to ``path`` at the end: a kill leaves the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text)


def machine() -> dict[str, str | int]:
    """What a reader needs to judge a measured time."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table padded so that it also reads as plain text."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(map(str.ljust, line, widths)) + " |"  # one cell per width
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def final_table(histories: Mapping[str, Sequence[History]]) -> tuple[str, str]:
    """Table of the test errors after the last epoch, and a sentence that names the winner."""
    rows, errors = [], {}
    for title, runs in histories.items():
        errors[title] = [run[-1]["test_error"] for run in runs]
        speed = statistics.median(epoch["images_per_second"] for run in runs for epoch in run)
        spread = statistics.stdev(errors[title]) if len(runs) > 1 else math.nan
        rows.append(
            [
                title,
                f"{statistics.fmean(errors[title]):.2f}",
                f"{spread:.2f}" if len(runs) > 1 else "-",
                f"{min(errors[title]):.2f} to {max(errors[title]):.2f}",
                str(len(runs)),
                f"{max(run[-1]['orthonormality_error'] for run in runs):.1e}",
                f"{speed:.0f}",
            ]
        )
    header = ["Method", "Test error %", "Deviation", "Range", "Seeds", "Orthonormality", "Images/s"]
    ranked = sorted(errors, key=lambda title: statistics.fmean(errors[title]))
    winner = f"Lowest mean test error: {ranked[0]}, {statistics.fmean(errors[ranked[0]]):.2f} %"
    if len(ranked) > 1:
        first, second = errors[ranked[0]], errors[ranked[1]]
        gap = statistics.fmean(second) - statistics.fmean(first)
        apart = "do not overlap" if max(first) < min(second) else "overlap"
        seeds = "one seed only" if len(first) == 1 else f"their ranges over the seeds {apart}"
        winner += f", {gap:.2f} points below {ranked[1]} ({seeds})"
    return markdown_table(header, rows), winner + "."


def plot_curves(path: Path, title: str, histories: Mapping[str, Sequence[History]]) -> None:
    """Test error and orthonormality error by epoch: mean over seeds as a line, range as a band."""
    require("matplotlib").use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    panels = (("test_error", "test error (%)"), ("orthonormality_error", "max |W W' - I|"))
    for axis, (key, label) in zip(axes, panels, strict=True):
        for index, (name, runs) in enumerate(histories.items()):
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}
            epochs = [epoch["epoch"] for epoch in runs[0]]
            values = list(zip(*([epoch[key] for epoch in run] for run in runs), strict=True))
            axis.plot(epochs, [statistics.fmean(v) for v in values], label=name, **style)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axis.fill_between(epochs, low, high, color=style["color"], alpha=0.2, linewidth=0)
        axis.set(xlabel="epoch", ylabel=label, yscale="log")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0].yaxis.set_major_formatter(ScalarFormatter())
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_title("Test error after each epoch")
    axes[1].set_title("Orthonormality of the query and key matrices")
    axes[0].legend()
    figure.suptitle(title)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150)
    pyplot.close(figure)


def rate_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up, then a cosine from 1 down to 1 %."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2


def check_configuration(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that was started with other settings."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise ValueError(
                f"--resume must keep {key} = {theirs.get(key)!r} of {name}, "
                f"got {value!r}; choose another --output, or drop --resume to start again"
            )


class Trainer:
    """Trains a classifier with warm-up, cosine and label smoothing; a checkpoint after each epoch.

    ``configuration`` holds ``epochs``, ``batch_size``, ``warmup`` (epochs), ``smoothing``,
    ``augment``, ``seed`` and whatever else the result depends on: a checkpoint of another
    configuration is refused. ``orthonormality_error`` is called to be shown and recorded,
    ``penalty`` at each step to be added to the loss that is minimised, not to the one recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        images: Images,
        configuration: dict[str, Any],
        path: Path,
        orthonormality_error: Callable[[], Tensor],
        penalty: Callable[[], Tensor] | None = None,
    ) -> None:
        self.model, self.optimizer, self.images = model, optimizer, images
        self.configuration, self.path = configuration, path
        self.orthonormality_error, self.penalty = orthonormality_error, penalty
        self.batch_size: int = configuration["batch_size"]
        self.steps = len(images.train_images) // self.batch_size  # an epoch; the rest is left out
        if self.steps == 0:
            raise ValueError(
                f"--batch-size must be at most the {len(images.train_images)} training images, "
                f"got {self.batch_size}"
            )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            partial(
                rate_factor,
                warmup_steps=round(configuration["warmup"] * self.steps),
                total_steps=configuration["epochs"] * self.steps,
            ),
        )
        self.generator = torch.Generator().manual_seed(configuration["seed"])
        self.history: list[dict[str, float]] = []

    def save(self) -> None:
        """Everything that the rest of the run depends on."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "generator": self.generator.get_state(),
            "history": self.history,
            "configuration": self.configuration,
        }
        with atomic(self.path) as temporary:
            torch.save(state, temporary)

    def resume(self) -> None:
        """Go on after the last saved epoch, bit for bit as if nothing had happened in between."""
        state = torch.load(self.path, map_location=self.images.mean.device, weights_only=True)
        check_configuration(self.path.name, state["configuration"], self.configuration)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.generator.set_state(state["generator"].cpu())
        self.history = state["history"]

    def step(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Train on the images of these indices; return the loss and how many were right."""
        batch, labels = self.images.train_images[picked], self.images.train_labels[picked]
        if self.configuration["augment"] == "crop-flip":
            batch = crop_flip(batch, self.generator)
        logits = self.model(self.images.normalize(batch))
        smoothing = self.configuration["smoothing"]
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        self.optimizer.zero_grad()
        (loss if self.penalty is None else loss + self.penalty()).backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach(), (logits.detach().argmax(1) == labels).sum()

    def train(self, title: str) -> None:
        """Train the epochs that are missing and save after each."""
        epochs, done = self.configuration["epochs"], len(self.history)
        bar = require("tqdm").tqdm(
            desc=title, total=epochs * self.steps, initial=done * self.steps, disable=None
        )
        for epoch in range(done + 1, epochs + 1):
            record = {"epoch": epoch} | self.train_epoch(bar)
            self.history.append(record)
            self.save()
            if bar.disable:  # a log file instead of a terminal
                text = ", ".join(f"{key} {value:.4g}" for key, value in record.items())
                print(f"{title}: {text}", flush=True)
        bar.close()

    def train_epoch(self, bar: Any) -> dict[str, float]:
        """One pass over the training images in random order, then the test error."""
        order = torch.randperm(len(self.images.train_images), generator=self.generator)
        order = order[: self.steps * self.batch_size].to(self.images.mean.device)
        loss_sum = right = torch.zeros((), device=order.device)
        self.model.train()
        start = time.perf_counter()
        for index, picked in enumerate(order.split(self.batch_size), start=1):
            loss, correct = self.step(picked)
            loss_sum, right = loss_sum + loss, right + correct
            bar.update()
            if index % 20 == 0 and not bar.disable:  # not each step: reading a loss stalls a GPU
                speed = index * self.batch_size / (time.perf_counter() - start)
                bar.set_postfix_str(
                    f"loss {float(loss_sum) / index:.3f}, "
                    f"accuracy {float(right) / index / self.batch_size:.1%}, "
                    f"{speed:.0f} images/s, |WW'-I| {float(self.orthonormality_error()):.0e}"
                )
        record = {
            "train_loss": float(loss_sum) / self.steps,
            "train_accuracy": float(right) / len(order),
            "seconds": time.perf_counter() - start,  # training only; reading the loss has waited
        }
        record["images_per_second"] = len(order) / record["seconds"]
        record["test_error"] = self.test_error()
        record["orthonormality_error"] = float(self.orthonormality_error())
        return record

    @torch.no_grad()
    def test_error(self) -> float:
        """Per cent of the test images that are classified wrongly."""
        self.model.eval()
        images, labels = self.images.test_images, self.images.test_labels
        wrong = [
            (self.model(self.images.normalize(batch)).argmax(1) != answers).sum()
            for batch, answers in zip(images.split(500), labels.split(500), strict=True)
        ]
        return 100 * float(torch.stack(wrong).sum()) / len(labels)

    def seconds_per_epoch(self) -> float:
        """Measured on a few steps, which change the model: use a trainer of its own for this."""
        times = []
        for _ in range(5):
            start = time.perf_counter()
            self.step(torch.arange(self.batch_size, device=self.images.mean.device))
            times.append(time.perf_counter() - start)
        return statistics.median(times) * self.steps * 1.1  # a tenth for the test images
