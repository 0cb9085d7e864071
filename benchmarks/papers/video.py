"""Video: predict the next frame with recurrent units whose states are images.

    python benchmarks/papers/video.py                         # moving digits of scikit-learn
    python benchmarks/papers/video.py --methods all --resume  # every optimizer and constraint
    python benchmarks/papers/video.py --data mnist --data-dir DIR --side 64 --channels 16 \\
        --methods all
    python benchmarks/papers/video.py --data kth --data-dir DIR --side 128 --channels 32 \\
        --batch-size 3 --frames 24 --epochs 150 --steps 100 --methods all --device cuda --resume

`mnist` wants idx files or mnist.npz. `kth` wants one .npz for each video with `frames`, uint8 of
shape (T, side, side), named as the videos are: person01_walking_d1.npz. To make them from the
public .avi files:

    for f in *_uncomp.avi; do ffmpeg -i $f -vf crop=120:120,scale=128:128 -pix_fmt gray \\
        -f rawvideo ${f%_uncomp.avi}.raw; done
    python -c "import glob, numpy as n; [n.savez(f[:-4], frames=n.fromfile(f, n.uint8).reshape(
        -1, 128, 128)) for f in glob.glob('*.raw')]"

Groups of 2 x 2 pixels become 4 channels; then five recurrent units of c, 2c, 4c, 2c and c
channels, with convolutions of stride 2, transposed ones and skips between them. Units: ConvNERU
with its kernel held on the Stiefel manifold in many ways, free, or zero; and ConvLSTM. After
Likhosherstov et al. (AISTATS 2021), section 4.3 and appendix E; there c = 32, on KTH.
"""

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _cells import Both
from _common import (
    Help,
    Panel,
    add_flags,
    announce,
    finish_flags,
    markdown_table,
    plot_curves,
    run,
    spread,
    worst,
    write_table,
)
from _training import Record, Trainer, train_all
from _video import ConvLSTM, live_bytes, load_clips, plot_strip
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.nn import ConvNERU


class Method(NamedTuple):
    """How one row keeps the recurrent kernel, and what trains it if tagged."""

    transition: str | None = None
    rule: Callable[..., torch.optim.Optimizer] | None = None
    start: str = ""  # of a free kernel


def descent(metric: str, retraction: str) -> Method:
    return Method("tagged", partial(so.ProjectedRGD, metric=metric, retraction=retraction))


METHODS = {
    "T-CWY": Method("tcwy"),
    "OWN": Method("own"),
    "StiefelAdam": Method("tagged", so.StiefelAdam),
    "StiefelSGD": Method("tagged", partial(so.StiefelSGD, momentum=0.9)),
    "RGD-C-C": descent("canonical", "cayley"),
    "RGD-E-C": descent("euclidean", "cayley"),
    "RGD-C-QR": descent("canonical", "qr"),
    "RGD-E-QR": descent("euclidean", "qr"),
    "Cayley Adam": Method("tagged", so.CayleyAdam),
    "Glorot start": Method(start="glorot"),
    "Orthogonal start": Method(start="orthogonal"),
    "Zero kernel": Method(start="zero"),
    "ConvLSTM": Method(start="lstm"),
}
DEFAULT = ["T-CWY", "StiefelAdam", "Orthogonal start", "Zero kernel", "ConvLSTM"]
DESCENT = ("StiefelSGD", "RGD-C-C", "RGD-E-C", "RGD-C-QR", "RGD-E-QR")  # take --sgd-lr
SETTINGS = ["data", "side", "channels", "frames", "batch_size", "epochs", "steps", "lr", "sgd_lr"]
SMOKE = {"side": 16, "channels": 2, "frames": 4, "epochs": 1, "steps": 2}
SMOKE |= {"methods": ["T-CWY", "RGD-C-QR", "ConvLSTM"]}


class Predictor(nn.Module):
    """Frames ``(T, batch, side, side)`` to predictions of the next ones, of the same shape."""

    def __init__(self, method: Method, channels: int) -> None:
        super().__init__()
        c = channels
        widths = (c, 2 * c, 4 * c, 2 * c, c)
        conv, turned = nn.Conv2d, nn.ConvTranspose2d
        self.between = nn.ModuleList(
            [
                conv(4, c, 3, 1, 1),
                conv(c, 2 * c, 3, 2, 1),
                conv(2 * c, 4 * c, 3, 2, 1),
                turned(4 * c, 2 * c, 4, 2, 1),
                turned(4 * c, c, 4, 2, 1),  # from a unit and its skip
                conv(2 * c, 4, 3, 1, 1),
            ]
        )
        self.recurrent = nn.ModuleList(self.unit(method, width) for width in widths)
        # ConvLSTM as in the paper, where it needed instance normalization and the others not.
        self.normalize = nn.functional.instance_norm if method.start == "lstm" else nn.Identity()

    @staticmethod
    def unit(method: Method, width: int) -> nn.Module:
        """One recurrent unit with as many channels in as out."""
        if method.start == "lstm":
            return ConvLSTM(width, width)
        unit = ConvNERU(width, width, transition=method.transition)
        if method.start == "glorot":
            nn.init.xavier_uniform_(unit.hidden_conv.weight)
        if method.start == "zero":
            unit.hidden_conv.weight.requires_grad_(False).zero_()
        return unit

    def turn(self, level: int, images: Tensor) -> Tensor:
        """The convolution before a unit, at every time."""
        flat = self.normalize(self.between[level](images.flatten(0, 1)))
        return torch.relu(flat).unflatten(0, images.shape[:2])

    def forward(self, frames: Tensor) -> Tensor:
        images, skips = nn.functional.pixel_unshuffle(frames.unsqueeze(2), 2), []
        for level, unit in enumerate(self.recurrent):
            images, _ = unit(self.turn(level, images))
            if level < 2:
                skips.append(images)
            elif level > 2:
                images = torch.cat([images, skips.pop()], dim=2)
        last = self.between[-1](images.flatten(0, 1)).unflatten(0, images.shape[:2])
        return nn.functional.pixel_shuffle(last, 2).squeeze(2)

    def orthonormality_error(self) -> float | None:
        """Largest |q^2 K'K - I| of a recurrent kernel as a matrix; None for a ConvLSTM."""
        errors = [0.0]
        for unit in self.recurrent:
            if not isinstance(unit, ConvNERU):
                return None
            matrix = 3 * unit.hidden_conv.weight.detach().flatten(1)
            errors.append(
                float((matrix @ matrix.mT - torch.eye(len(matrix)).to(matrix)).abs().max())
            )
        return max(errors)


class Prediction:
    """Summed absolute error of every predicted frame, as in the paper."""

    def __init__(self, model: Predictor, clips: Mapping[str, Any], options: Namespace) -> None:
        self.model, self.clips, self.options = model, clips, options
        self.steps = options.steps

    def batches(self, generator: torch.Generator) -> Iterator[Tensor]:
        for _ in range(self.steps):
            yield self.clips["train"](self.options.batch_size, generator)

    def error(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """l1 a frame, and the predictions; clips are (T, batch, side, side) in [0, 1]."""
        clips = clips.to(self.options.device)
        predicted = self.model(clips[:-1])
        return (predicted - clips[1:]).abs().sum((-2, -1)).mean(), predicted

    def loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, _ = self.error(batch)
        return loss / batch[0, 0].numel(), {"train_l1": loss.detach()}

    def evaluate(self) -> dict[str, float | None]:
        measures: dict[str, float | None] = {
            part: float(self.error(self.clips[part])[0]) for part in ("valid", "test")
        }
        return measures | {"orthonormality_error": self.model.orthonormality_error()}


def build_trainer(options: Namespace, clips: Mapping[str, Any], title: str, seed: int) -> Trainer:
    """Everything one run needs; runs of one seed see the same clips."""
    method = METHODS[title]
    torch.manual_seed(seed)
    model = Predictor(method, options.channels).to(options.device)
    free = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if method.rule is None:
        optimizer = torch.optim.Adam(free, options.lr)
    else:
        kernels = [unit.hidden_conv.weight for unit in model.recurrent]
        tagged = {id(kernel) for kernel in kernels}
        rate = options.sgd_lr if title in DESCENT else options.lr
        others = [p for p in free if id(p) not in tagged]
        optimizer = Both(method.rule(kernels, lr=rate), torch.optim.Adam(others, options.lr))
    settings = {key: getattr(options, key) for key in SETTINGS}
    settings |= {"method": title, "seed": seed}
    path = options.output / "checkpoints" / f"{title}-{seed}.pt".replace(" ", "-")
    task = Prediction(model, clips, options)
    return Trainer(
        model, optimizer, task, settings, path, counted=("clips", options.batch_size), clip=1.0
    )


def best(run: Record) -> Mapping[str, float]:
    """The epoch with the smallest error on the validation clips, as in the paper."""
    return min(run["history"], key=lambda entry: entry["valid"])


def report(
    options: Namespace, clips: Mapping[str, Any], records: Mapping[str, Sequence[Record]]
) -> None:
    """Write the table and draw curves and strip of the runs that are over."""
    test = clips["test"]
    still = float((test[1:] - test[:-1]).abs().sum((-2, -1)).mean())
    rows = []
    for title, runs in records.items():
        if title not in options.memory:
            build = partial(build_trainer, options, clips, title, 0)
            options.memory[title] = live_bytes(build)
        row = [title, spread([best(run)["test"] for run in runs], ".1f")]
        row += [f"{runs[0]['parameters']:,}", f"{options.memory[title] / 2**20:.1f}"]
        seconds = [entry["seconds"] / options.steps for run in runs for entry in run["history"]]
        row.append(f"{1000 * statistics.median(seconds):.0f}")
        rows.append([*row, worst([best(run)["orthonormality_error"] for run in runs])])
    rows.append(["last frame again", f"{still:.1f}", "0", "-", "-", "-"])
    header = ["Recurrent unit", "Test l1 a frame", "Parameters", "MiB a step", "ms a step"]
    title = (
        f"Next frame of {options.data}: {options.side} x {options.side} pixels, "
        f"{options.frames} frames, c = {options.channels}, {options.epochs * options.steps} steps "
        f"of {options.batch_size} clips, seeds {', '.join(map(str, options.seeds))}"
    )
    runs = [run for group in records.values() for run in group]
    table = markdown_table([*header, "Orthonormality"], rows)
    write_table(options.output, title, table, {"last_frame": still, "runs": runs})
    panel = Panel("valid", "l1 a frame, validation", levels={"last frame again": still})
    histories = {name: [run["history"] for run in group] for name, group in records.items()}
    short = f"Next frame of {options.data}, {options.side} x {options.side} pixels"
    plot_curves(options.output / "curves.png", short, histories, [panel])
    if all(len(records.get(name, [])) == len(options.seeds) for name in options.methods):
        draw_strip(options, clips, records)  # takes seconds: once, at the end


@torch.no_grad()
def draw_strip(
    options: Namespace, clips: Mapping[str, Any], records: Mapping[str, Sequence[Record]]
) -> None:
    """One test clip: true frames, and below what each method predicted for them."""
    clip = clips["test"][:, :1]
    rows = {"true": clip[1:, 0]}
    for title in records:
        trainer = build_trainer(options, clips, title, options.seeds[0])
        trainer.resume()
        rows[title] = trainer.task.error(clip)[1][:, 0].cpu()  # type: ignore[attr-defined]
    plot_strip(options.output / "strip.png", rows)


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    """Flags over the smoke sizes over defaults."""
    parser = ArgumentParser(
        description="Predict the next frame with ConvNERU and ConvLSTM.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--data", choices=["digits", "mnist", "kth"], default="digits",
        help="digits needs no files")  # fmt: skip
    add("--data-dir", type=Path, default=Path("data"), help="of mnist or kth")
    add("--methods", nargs="+", choices=[*METHODS, "all"], default=DEFAULT, metavar="METHOD",
        help=f"of {', '.join(METHODS)}, or all")  # fmt: skip
    add("--side", type=int, default=32, help="pixels, a multiple of 8")
    add("--frames", type=int, default=12, help="of a clip")
    add("--channels", type=int, default=8, help="c, of the first unit")
    add("--epochs", type=int, default=8, help="of --steps batches, each with a test")
    add("--steps", type=int, default=50, help="batches an epoch")
    add("--batch-size", type=int, default=8, help="clips in a step")
    add("--lr", type=float, default=3e-3, help="of Adam, StiefelAdam and Cayley Adam")
    add("--sgd-lr", type=float, default=0.1, help="of StiefelSGD and RGD")
    add_flags(parser, Path("runs/video"))
    if parser.parse_known_args(argv)[0].smoke:
        parser.set_defaults(**SMOKE)
    options = parser.parse_args(argv)
    if options.side % 8 or options.frames < 2 or min(options.epochs, options.steps) < 1:
        parser.error("--side must be a multiple of 8, --frames 2, --epochs and --steps 1 or more")
    options.methods = list(METHODS) if "all" in options.methods else options.methods
    options.memory = {}  # bytes of a step of each method, measured once
    return finish_flags(parser, options)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every method with every seed; print the table and where the pictures are."""
    options = parse_arguments(argv)
    clips = load_clips(options)
    build = partial(build_trainer, options, clips)
    once = sum(build(title, 0).expected_seconds(2) for title in options.methods)
    what = f"Next frames of {options.data}: {', '.join(options.methods)}; {options.epochs} epochs."
    announce(options, what, once * len(options.seeds))
    train_all(options, options.methods, build, partial(report, options, clips))
    print(f"\n{(options.output / 'table.md').read_text()}")
    print(f"Pictures: {options.output / 'curves.png'}, {options.output / 'strip.png'}")


if __name__ == "__main__":
    run(main)
