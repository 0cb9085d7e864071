"""Tables of the README and of choosing.md that gather figures of several files of results.

`publish.py` copies them as it copies a table of one file; a page names this file and the table.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

TEN_MINUTES = "cifar10, 600 s"  # a row of certified.json
RESULTS = Path(__file__).resolve().parents[1] / "results"


@functools.cache
def content(name: str) -> dict[str, Any]:
    """A file of results, which many cells are from."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def cell(name: str, table: str, row: tuple[str, ...], column: str) -> str:
    """The cell of a stored table in ``column``, in the row whose first cells are ``row``."""
    from benchmarks.common.publish import rows_of

    header, *rows = rows_of(content(name)["tables"][table])
    (found,) = {tuple(line) for line in rows if tuple(line[: len(row)]) == row}
    return found[header.index(column)]


def share_of_error() -> str:
    """The test error of the demo over the least of the other rows, at the best learning rates."""
    errors = content("demo")["errors"]
    least = {method: min(map(statistics.fmean, rows)) for method, rows in errors.items()}
    ours = least.pop("StiefelAdamW")
    return f"{ours / min(least.values()):.2f}"


def mean(text: str) -> str:
    """The mean of "mean ± standard error"."""
    return text.split(" ± ")[0]


def figures() -> dict[str, str]:
    """What the rows below say, by a name."""
    found = {
        name: mean(cell("certified", "runs", (TEN_MINUTES, network), "36/255"))
        for name, network in (
            ("certified", "ShiftConv2d"),
            ("AOC", "orthogonium, AOC"),
        )
    }
    found["demo"] = share_of_error()
    layer = "torch_orthogonal", "summary", ("2048 x 16",)
    found["ms"] = cell(*layer, "so.constrain, StiefelAdamW")
    found["torch ms"] = cell(*layer, "torch, its default")
    for name, method in (
        ("recalled", "constrained, StiefelAdam"),
        ("recalled without", "unconstrained, same initialisation"),
    ):
        found[name] = cell("why", "copying", (method, "100"), "% right there (seeds)").split()[0]
    found["evaluations"] = f"{content('minimize')['median']['evaluations']:.2f}"
    for how in ("learned", "as loaded"):
        rounded = cell("rotated_weights", "rows", (f"W4 A4, {how}",), "GPTQ, groups of 32")
        found[how] = f"{float(mean(rounded)):,.0f}"
    for adapter in ("StelLA", "LoRA"):
        found[adapter] = mean(cell("adapters", "topics", (adapter,), "perplexity, topics"))
    pairs = "prw_pot", "pairs"
    gaps = [cell(*pairs, ("45 of digits", name), "Gap %") for name in ("ours", "POT, 500 steps")]
    assert float(gaps[0]) < float(gaps[1])  # the row of the README says so
    found["share"] = cell(*pairs, ("45 of digits", "ours"), "Of POT's")
    return found


def ratio_of(network: str, arm: str = "learn_scale=True") -> str:
    """Test loss over that of the better of AdamW and NAdam, each at its best learning rate."""
    ratios = "when_to_constrain", "stage 2, short, falling: ratios", (network,)
    return cell(*ratios, arm).split(" / ")[1]


def use() -> list[tuple[str, str, str]]:
    """What a reader has, what to use, and what it gives, with a link to the whole table."""
    of = figures()
    return [
        (
            "a training loop with Adam or SGD",
            "`so.constrain(layer, learn_scale=True)`, `so.StiefelAdam`",
            f"a perceptron, MNIST: [{ratio_of('perceptron, MNIST')} of the test loss]"
            "(docs/choosing.md#should-i-constrain-it) of the better of AdamW and NAdam",
        ),
        (
            "a transformer to train from scratch",
            "`so.constrain_transformer(model)`, `so.StiefelAdamW`",
            "`make demo`: [{demo} of the test error](#get-it-and-run-it) of the next "
            "best row".format_map(of),
        ),
        (
            "`parametrizations.orthogonal` of torch",
            "[`so.compat.orthogonal`](docs/doors.md) or `so.constrain`",
            "2048 x 16: [{ms} ms a step, torch {torch ms}](docs/doors.md#beside-torch)".format_map(
                of
            ),
        ),
        (
            "a recurrent network that must remember",
            "`so.nn.OrthogonalRNN`",
            "digits after 100 steps: [{recalled} % right, unconstrained {recalled without} %]"
            "(docs/why.md#memory)".format_map(of),
        ),
        (
            "a network with a certified bound",
            "`so.nn.ShiftConv2d`, `so.lipschitz_bound`",
            "CIFAR-10 at 36/255, equal time: [{certified} % certified]"
            "(docs/certified.md#measured), orthogonium {AOC} %".format_map(of),
        ),
        (
            "PCA, Procrustes, a rotation (det +1)",
            "[`so.minimize`, `so.polar(A, determinant=1)`](docs/problems.md)",
            "[{evaluations} of the evaluations](docs/lbfgs.md) of pymanopt".format_map(of),
        ),
        (
            "samples to compare (optimal transport)",
            "[`so.ot`](docs/transport.md)",
            "45 pairs of digits: nearer to the optimum than POT's solver in [{share} of its time]"
            "(docs/transport.md#beside-pot)".format_map(of),
        ),
        (
            "a language model to be rounded",
            "[`so.rotations`](docs/rotations.md)",
            "four bits: [perplexity {learned}, not rotated {as loaded}]"
            "(docs/rotations.md#for-which-bits)".format_map(of),
        ),
        (
            "LoRA",
            "keep it; [adapters](docs/adapters.md) with orthonormal factors",
            "no gain: perplexity {StelLA}, [LoRA {LoRA}](docs/adapters.md"
            "#does-it-adapt-better-and-forget-less)".format_map(of),
        ),
    ]


def cost() -> list[tuple[str, ...]]:
    """Milliseconds of training a layer, and of a step alone; "-" is not comparable."""
    steps, layers = ("step_time", "2 threads"), ("torch_orthogonal", "summary")
    rows: list[tuple[str, ...]] = []
    for shape in ("576 x 576", "2048 x 16"):
        names = ("so.constrain, StiefelAdamW", "torch, its default", "geotorch")
        ours, torchs, geotorch = (cell(*layers, (shape,), name) for name in names)
        rows.append((f"a layer of {shape}", "-", "-", ours, "-", torchs, geotorch))
    for shape in ("168 separate 384 x 32", "one 4096 x 512", "one 128 x 2"):
        names = ("StiefelSGD", "POGO, SGD", "StiefelAdam", "geoopt Adam")
        rows.append((f"step: {shape}", *(cell(*steps, (shape,), name) for name in names), "-", "-"))
    return rows


def questions() -> list[tuple[str, str, str]]:
    """The questions that decide, in order: the first yes counts."""
    known = figures()
    of = {name: ratio_of(name) for name in (
        "tanh RNN, rows", "perceptron, MNIST", "20 tanh layers", "CNN",
    )}  # fmt: skip
    of |= {name: ratio_of(name, "fixed 1") for name in (
        "ViT, all matrices", "character transformer",
    )}  # fmt: skip
    of |= {name: ratio_of(name, "Muon") for name in (
        "GRU, rows", "LSTM, characters",
        "residual, no norm", "residual, pre-norm", "residual, post-norm",
    )}  # fmt: skip
    return [
        (
            "1. Does the problem ask for orthonormal columns (PCA, alignment, transport)?",
            "`so.minimize(loss, (n, m))`",
            f"[{known['evaluations']} of the evaluations](lbfgs.md) of pymanopt",
        ),
        (
            "2. Do you have torch's `orthogonal`?",
            "`so.constrain(layer)`, or [change the import](doors.md)",
            f"2048 x 16: [{known['ms']} ms, torch {known['torch ms']}](doors.md#beside-torch)",
        ),
        (
            "3. Is the model pretrained?",
            "no; [adapters](adapters.md): LoRA",
            f"perplexity {known['LoRA']}, with orthonormal factors {known['StelLA']}",
        ),
        (
            "4. Must a bound be proved?",
            "`so.nn.ShiftConv2d(c, d)`, [certified networks](certified.md)",
            f"{known['certified']} % certified, orthogonium {known['AOC']} %",
        ),
        (
            "5. Is it a transformer?",
            "`so.constrain_transformer(model)`",
            f"ViT {of['ViT, all matrices']}, characters {of['character transformer']}",
        ),
        (
            "6. A plain recurrent network?",
            '`so.constrain(rnn, "weight_hh_l0", learn_scale=True)`; [long memory](why.md#memory): '
            "`so.nn.OrthogonalRNN`",
            of["tanh RNN, rows"],
        ),
        (
            "7. A GRU or LSTM?",
            "no; torch's Muon",
            f"GRU {of['GRU, rows']}, LSTM {of['LSTM, characters']}",
        ),
        (
            "8. Has it residual connections?",
            "no; torch's Muon",
            f"{of['residual, no norm']} without norms, {of['residual, pre-norm']} with norms "
            f"before, {of['residual, post-norm']} after",
        ),
        (
            "9. A perceptron, deep layers without norms, a CNN?",
            "`so.constrain(layer, learn_scale=True)`",
            f"{of['perceptron, MNIST']}, {of['20 tanh layers']}, {of['CNN']}",
        ),
        ("10. Anything else", "`so.orthogonal_(weight)` at the beginning, AdamW", "-"),
    ]


HEADERS = {
    "choose": ("Question", "At the first yes", "Measured"),
    "use": ("You have", "Use", "It gives, measured"),
    "cost": ("ms", "StiefelSGD", "POGO SGD", "StiefelAdamW", "geoopt Adam", "torch", "geotorch"),
}


def tables() -> dict[str, list[list[str]]]:
    """Each table: its header, then its rows."""
    rows = {"choose": questions(), "use": use(), "cost": cost()}
    return {name: [list(line) for line in (HEADERS[name], *rows[name])] for name in HEADERS}
