"""Tables of the README and of choosing.md that gather figures of several files of results.

`publish.py` copies them as it copies a table of one file; a page names this file and the table.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def content(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def cell(name: str, table: str, row: tuple[str, ...], column: str) -> str:
    """The cell of a stored table in ``column``, in the row whose first cells are ``row``."""
    from benchmarks.common.publish import rows_of

    header, *rows = rows_of(content(name)["tables"][table])
    (found,) = {tuple(line) for line in rows if tuple(line[: len(row)]) == row}
    return found[header.index(column)]


def demo_error(method: str, rate: str) -> str:
    demo = content("demo")
    return f"{statistics.fmean(demo['errors'][method][demo['rates'].index(float(rate))]):.1f}"


def mean(text: str) -> str:
    """The mean of "mean ± standard error"."""
    return text.split(" ± ")[0]


def use() -> list[tuple[str, str, str]]:
    """What a reader has, what to use, and what it gives, with a link to the whole table."""
    advice = "when_to_constrain", "advice"
    ratio = cell(*advice, ("perceptron, MNIST",), "ratio").split(" / ")[1]
    shapes = "torch_orthogonal", "summary", ("2048 x 16",)
    ours, theirs = (
        cell(*shapes, name) for name in ("so.constrain, StiefelAdamW", "torch, its default")
    )
    recalled = [
        cell("why", "copying", (method, "100"), "% right there (seeds)").split()[0]
        for method in ("constrained, StiefelAdam", "unconstrained, same initialisation")
    ]
    certified = [
        mean(cell("certified", "runs", ("cifar10, 60 s", network), "36/255"))
        for network in ("ShiftConv2d", "deel-torchlip", "orthogonium, AOC")
    ]
    evaluations = f"{content('minimize')['median']['evaluations']:.2f}"
    rounded = [
        float(mean(cell("rotated_weights", "rows", (f"W4 A4, {how}",), "GPTQ, groups of 32")))
        for how in ("Hadamard", "as loaded")
    ]
    adapters = [
        mean(cell("adapters", "topics", (adapter,), "perplexity, topics"))
        for adapter in ("StelLA", "LoRA")
    ]
    pairs = "prw_pot", "pairs"
    gap, share = (cell(*pairs, ("45 of digits", "ours"), name) for name in ("Gap %", "Of POT's"))
    pots = cell(*pairs, ("45 of digits", "POT, 500 steps"), "Gap %")
    demo = [demo_error(method, "0.03") for method in ("StiefelAdamW", "AdamW")]
    return [
        (
            "a training loop with Adam or SGD",
            "`so.constrain(layer, learn_scale=True)`, `so.StiefelAdam`",
            f"a perceptron: [{ratio} of the test loss](docs/choosing.md#should-i-constrain-it)",
        ),
        (
            "a transformer",
            "`so.constrain_transformer(model)`, `so.StiefelAdamW`",
            f"test error {demo[0]} %, AdamW {demo[1]} %, at a learning rate of 0.03 (`make demo`)",
        ),
        (
            "`parametrizations.orthogonal` of torch",
            "[`so.compat.orthogonal`](docs/doors.md) or `so.constrain`",
            f"2048 x 16: [{ours} ms a step, torch {theirs}](docs/doors.md#beside-torch)",
        ),
        (
            "a recurrent network that must remember",
            "`so.nn.OrthogonalRNN`",
            f"[{recalled[0]} % recalled, unconstrained {recalled[1]} %](docs/why.md#memory)",
        ),
        (
            "a network with a certified bound",
            "`so.nn.ShiftConv2d`, `so.lipschitz_bound`",
            f"[{certified[0]} % certified](docs/certified.md#measured), other packages "
            f"{certified[1]} and {certified[2]} %",
        ),
        (
            "PCA, Procrustes, a rotation (det +1)",
            "[`so.minimize`, `so.polar(A, determinant=1)`](docs/problems.md)",
            f"[{evaluations} of the evaluations](docs/lbfgs.md) of pymanopt",
        ),
        (
            "samples to compare (optimal transport)",
            "[`so.ot`](docs/transport.md)",
            f"45 pairs of digits: [{gap} % from the best, POT {pots} %, in {share} of its time]"
            "(docs/transport.md#beside-pot)",
        ),
        (
            "a language model to be rounded",
            "[`so.rotations`](docs/rotations.md)",
            f"four bits: [perplexity {rounded[0]:.0f}, not rotated {rounded[1]:,.0f}]"
            "(docs/rotations.md#for-which-bits)",
        ),
        (
            "LoRA",
            "[`so.StellaConfig`](docs/adapters.md)",
            f"no gain: perplexity {adapters[0]}, LoRA {adapters[1]}",
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


def ratio_of(network: str) -> str:
    """Test loss over that of the better of AdamW and NAdam, each at its best learning rate."""
    return cell("when_to_constrain", "advice", (network,), "ratio").split(" / ")[1]


def questions() -> list[tuple[str, str, str]]:
    """The questions that decide, in order: the first yes counts."""
    shape = "torch_orthogonal", "summary", ("2048 x 16",)
    tag, torchs = (
        cell(*shape, name) for name in ("so.constrain, StiefelAdamW", "torch, its default")
    )
    evaluations = f"{content('minimize')['median']['evaluations']:.2f}"
    adapters = [
        mean(cell("adapters", "topics", (adapter,), "perplexity, topics"))
        for adapter in ("StelLA", "LoRA")
    ]
    shift, other = (
        mean(cell("certified", "runs", ("cifar10, 60 s", network), "36/255"))
        for network in ("ShiftConv2d", "deel-torchlip")
    )
    of = {name: ratio_of(name) for name in (
        "ViT, all matrices", "character transformer", "tanh RNN, rows", "GRU, rows",
        "LSTM, characters", "residual, no norm", "residual, post-norm", "perceptron, MNIST",
        "20 tanh layers", "CNN",
    )}  # fmt: skip
    return [
        (
            "1. Does the problem ask for orthonormal columns (PCA, alignment, transport)?",
            "`so.minimize(loss, (n, m))`",
            f"[{evaluations} of the evaluations](lbfgs.md) of pymanopt",
        ),
        (
            "2. Do you have torch's `orthogonal`?",
            "`so.constrain(layer)`, or [change the import](doors.md)",
            f"2048 x 16: [{tag} ms, torch {torchs}](doors.md#beside-torch)",
        ),
        (
            "3. Is the model pretrained?",
            "no; [adapters](adapters.md): LoRA",
            f"perplexity {adapters[1]}, with orthonormal factors {adapters[0]}",
        ),
        (
            "4. Must a bound be proved?",
            "`so.nn.ShiftConv2d(c, d)`, [certified networks](certified.md)",
            f"{shift} % certified, deel-torchlip {other} %",
        ),
        (
            "5. Is it a transformer?",
            "`so.constrain_transformer(model)`",
            f"ViT {of['ViT, all matrices']}, characters {of['character transformer']}",
        ),
        (
            "6. A plain recurrent network?",
            '`so.nn.OrthogonalRNN(n, m)`; [long memory](why.md#memory): `nonlinearity="modrelu"`',
            of["tanh RNN, rows"],
        ),
        (
            "7. A GRU or LSTM?",
            "no; `so.orthogonal_(weight)` at the beginning",
            f"GRU {of['GRU, rows']}, LSTM {of['LSTM, characters']}",
        ),
        (
            "8. Has it residual connections?",
            "no; torch's Muon",
            f"{of['residual, no norm']} without norms, {of['residual, post-norm']} with",
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
