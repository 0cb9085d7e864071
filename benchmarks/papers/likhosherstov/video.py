"""Video: predict the next frame with recurrent units whose states are images.

    python -m benchmarks.papers.likhosherstov.video  # moving digits of scikit-learn
    python -m benchmarks.papers.likhosherstov.video --preset paper --action walking \\
        --data-dir DIR --device cuda --resume

The paper's experiment was never run here: no copy of KTH could be had. `--preset paper` is it as
far as appendix E tells: one action at a time, whole sequences padded with zeros, whole test sets,
c = 32, learning rate 1e-3, nothing clipped; its loss, an l1 norm, is taken as the sum over the
pixels, mean over the frames. The default is another, smaller experiment.

`mnist` wants mnist.npz. `kth` wants one .npz for each sequence with `frames`, uint8 of
shape (T, side, side), named person01_walking_d1_1.npz: the four sequences of a video, as the list
of the data set (00sequences.txt) cuts it, 120 x 120 pixels from the middle scaled to 128 x 128.

Groups of 2 x 2 pixels become 4 channels; then five recurrent units of c, 2c, 4c, 2c and c channels,
with strided and transposed convolutions and skips between them: ConvNERU with its kernel on the
Stiefel manifold in many ways, unconstrained, or zero; and ConvLSTM. `StiefelAdam` runs with
radius=1.0, nesterov=False. After Likhosherstov et al. (AISTATS 2021), section 4.3 and appendix E.
"""

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.common import programs
from benchmarks.common.harness import PRINTED
from benchmarks.common.training import Record, Trainer, compare
from benchmarks.papers.likhosherstov import video_units
from benchmarks.papers.likhosherstov.cells import by_two_rules


def descent(metric: str, retraction: str) -> video_units.Method:
    return video_units.Method(
        "tagged", partial(so.ProjectedRGD, metric=metric, retraction=retraction)
    )


METHODS = {
    "T-CWY": video_units.Method("tcwy"),
    "OWN": video_units.Method("own"),
    "StiefelAdam": video_units.Method("tagged", PRINTED),
    "StiefelSGD": video_units.Method("tagged", partial(so.StiefelSGD, momentum=0.9)),
    "RGD-C-C": descent("canonical", "cayley"),
    "RGD-E-C": descent("euclidean", "cayley"),
    "RGD-C-QR": descent("canonical", "qr"),
    "RGD-E-QR": descent("euclidean", "qr"),
    "CayleyAdam": video_units.Method("tagged", so.CayleyAdam),
    "Glorot initialisation": video_units.Method(start="glorot"),
    "Orthogonal initialisation": video_units.Method(start="orthogonal"),
    "Zero kernel": video_units.Method(start="zero"),
    "ConvLSTM": video_units.Method(start="lstm"),
}
# Millions of parameters in the paper's table 4, whose layers are not all given.
PUBLISHED = {"ConvLSTM": "3.26", "Zero kernel": "-", "StiefelAdam": "-", "StiefelSGD": "-"}
DEFAULT = ["T-CWY", "StiefelAdam", "Orthogonal initialisation", "Zero kernel", "ConvLSTM"]
DESCENT = ("StiefelSGD", "RGD-C-C", "RGD-E-C", "RGD-C-QR", "RGD-E-QR")  # take --sgd-lr
SETTINGS = ["data", "side", "channels", "frames", "batch_size", "epochs", "steps", "lr", "sgd_lr"]
SETTINGS += ["action", "first_stride", "summed", "clip"]
PRESETS = {
    "demo": {},
    "paper": {"data": "kth", "side": 128, "channels": 32, "batch_size": 3, "epochs": 150}
    | {"lr": 1e-3, "sgd_lr": 1e-3, "first_stride": 2, "summed": True, "clip": 0.0}
    | {"methods": [name for name in METHODS if not name.startswith("Stiefel")]},
}
SMOKE = {"side": 16, "channels": 2, "frames": 4, "epochs": 1, "steps": 2}
SMOKE |= {"methods": ["T-CWY", "RGD-C-QR", "ConvLSTM"]}


class Prediction:
    """Summed absolute error of every predicted frame, as in the paper."""

    def __init__(
        self, model: video_units.Predictor, clips: Mapping[str, Any], options: Namespace
    ) -> None:
        self.model, self.clips, self.options = model, clips, options
        self.steps = options.steps

    def batches(self, generator: torch.Generator) -> Iterator[Tensor]:
        yield from self.clips["train"](self.options, generator)

    def errors(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """l1 of every frame that is one, and the predictions of all.

        Clips are (T, batch, side, side) in [0, 1]; what follows a shorter one is negative.
        """
        clips = clips.to(self.options.device)
        predicted = self.model(clips[:-1].clamp(min=0))
        real = clips[1:, :, 0, 0] >= 0
        return (predicted - clips[1:]).abs().sum((-2, -1))[real], predicted

    def loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.errors(batch)[0].mean()
        size = 1 if self.options.summed else batch[0, 0].numel()
        return loss / size, {"train_l1": loss.detach()}

    def evaluate(self) -> dict[str, float | None]:
        measures: dict[str, float | None] = {}
        for part in ("valid", "test"):
            errors = torch.cat([self.errors(clips)[0] for clips in self.clips[part]])
            measures[part] = float(errors.mean())
        return measures | {"orthonormality_error": self.model.orthonormality_error()}


def build_trainer(options: Namespace, clips: Mapping[str, Any], title: str, seed: int) -> Trainer:
    """Everything one run needs; runs of one seed see the same clips."""
    method = METHODS[title]
    torch.manual_seed(seed)
    model = video_units.Predictor(method, options.channels, options.first_stride).to(options.device)
    adam = partial(torch.optim.Adam, lr=options.lr)
    if method.rule is None:
        optimizer = adam([p for p in model.parameters() if p.requires_grad])
    else:
        kernels = [unit.hidden_conv.weight for unit in model.recurrent]
        rate = options.sgd_lr if title in DESCENT else options.lr
        optimizer = by_two_rules(model, kernels, partial(method.rule, lr=rate), adam)
    settings = {key: getattr(options, key) for key in SETTINGS}
    settings |= {"method": title, "seed": seed}
    path = options.output / "checkpoints" / f"{title}-{seed}.pt".replace(" ", "-")
    task = Prediction(model, clips, options)
    counted, clip = ("clips", options.batch_size), options.clip or None
    return Trainer(model, optimizer, task, settings, path, counted=counted, clip=clip)


def best(run: Record) -> Mapping[str, float]:
    """The epoch with the smallest error on the validation clips, as in the paper."""
    return min(run["history"], key=lambda entry: entry["valid"])


def report(
    options: Namespace, clips: Mapping[str, Any], records: Mapping[str, Sequence[Record]]
) -> None:
    """Write the table and draw curves of the runs that are over."""
    moves = [
        (test[1:] - test[:-1]).abs().sum((-2, -1))[test[1:, :, 0, 0] >= 0] for test in clips["test"]
    ]
    still = float(torch.cat(moves).mean())
    rows = []
    for title, runs in records.items():
        if title not in options.memory:
            build = partial(build_trainer, options, clips, title, 0)
            options.memory[title] = video_units.live_bytes(build)
        row = [title, programs.spread([best(run)["test"] for run in runs], ".1f")]
        row += [f"{runs[0]['parameters']:,}", PUBLISHED.get(title, "0.72")]
        row.append(f"{options.memory[title] / 2**20:.1f}")
        seconds = [entry["seconds"] / options.steps for run in runs for entry in run["history"]]
        row.append(f"{1000 * statistics.median(seconds):.0f}")
        rows.append([*row, programs.worst([best(run)["orthonormality_error"] for run in runs])])
    rows.append(["last frame again", f"{still:.1f}", "0", "-", "-", "-", "-"])
    header = ["Recurrent unit", "Test l1 a frame", "Parameters", "Published, c = 32, millions"]
    header += ["MiB a step", "ms a step"]
    title = (
        f"Next frame of {options.data}: {options.side} x {options.side} pixels, "
        f"{options.frames} frames, c = {options.channels}, {options.epochs * options.steps} steps "
        f"of {options.batch_size} clips"
    )
    panels = [programs.Panel("valid", "l1 a frame, validation", levels={"last frame again": still})]
    short = f"Next frame of {options.data}, {options.side} x {options.side} pixels"
    table = ([*header, "Orthonormality"], rows)
    programs.write_report(options, title, table, records, panels, short, last_frame=still)


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    """Flags over the smoke sizes over defaults."""
    what = "Predict the next frame with ConvNERU and ConvLSTM."
    parser = ArgumentParser(description=what, formatter_class=programs.Help)
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
    add("--lr", type=float, default=3e-3, help="of Adam, StiefelAdam and CayleyAdam")
    add("--sgd-lr", type=float, default=0.1, help="of StiefelSGD and RGD")
    add("--action", choices=video_units.ACTIONS, default="walking", help="of kth")
    # Of the first convolution; is the loss not divided by the pixels? norm of the gradients.
    parser.set_defaults(first_stride=1, summed=False, clip=1.0)
    programs.add_flags(parser, Path("runs/video"))
    options = programs.parsed(parser, argv, SMOKE, PRESETS)
    if options.side % 8 or options.frames < 2 or min(options.epochs, options.steps) < 1:
        parser.error("--side must be a multiple of 8, --frames 2, --epochs and --steps 1 or more")
    options.methods = list(METHODS) if "all" in options.methods else options.methods
    options.memory = {}  # bytes of a step of each method, measured once
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train every method with every seed; print the table and where the pictures are."""
    options = parse_arguments(argv)
    clips = video_units.load_clips(options)  # and the steps of an epoch, for kth
    build = partial(build_trainer, options, clips)
    what = f"Next frames of {options.data}: {', '.join(options.methods)}; {options.epochs} epochs."
    compare(options, options.methods, build, partial(report, options, clips), what)


if __name__ == "__main__":
    programs.run(main)
