"""The recurrent cells of `copying.py` and `pixel_mnist.py`, and the optimizers that train them.

After Helfrich, Willmott & Ye (2018), Lezcano-Casado & Martinez-Rubio (2019) and Likhosherstov et
al. (AISTATS 2021), who run the code of the second unchanged: RMSprop, with a tenth of the rate for
the free tensors of an orthogonal transition; modReLU. The default rates are higher and fall by a
cosine, as training is short; with `--preset paper` they are theirs and constant. SCORNN is fixed at
D = I, as there.

A tagged transition has another rate than all free tensors: ten times `--transition-lr` in
`StiefelAdam` (with radius=1.0, nesterov=False), a thousand times in `ProjectedRGD`. That holds of
presets and of `--grid`, too: beside the rate R of RMSprop and R / 10 of free tensors stand R and
100 R.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import stiefel_opt as so
from benchmarks.common.harness import PRINTED
from stiefel_opt.nn import OrthogonalRNN


class Cell(NamedTuple):
    """How one row of the comparison keeps its transition orthogonal and is trained."""

    title: str
    transition: str | None = None  # None: an LSTM; FREE: nothing keeps it orthogonal
    options: Mapping[str, Any] = {}
    start: str | None = "as asked"
    complex_numbers: bool = False
    rule: type[torch.optim.Optimizer] | None = None  # for a tagged transition
    rate: float = 1.0  # of the transition, times the rate asked for


FREE = "free"
CELL_SETTINGS = ["hidden", "lstm_hidden", "lr", "transition_lr", "decay", "nonlinearity", "start"]
CELLS = {
    "cwy": Cell("CWY", "cwy"),
    "tcwy": Cell("T-CWY", "tcwy"),
    "hr": Cell("HR", "householder"),
    "expm": Cell("EXPRNN", "matrix_exp"),
    "dtriv": Cell("DTRIV", "trivialization", {"every": 100}),
    "dtriv-inf": Cell("DTRIV-inf", "trivialization", {"every": None}),
    "cayley": Cell("SCORNN", "cayley", {"negative": 0}, start="helfrich"),
    "urnn": Cell("URNN", "urnn", start=None, complex_numbers=True),
    "eurnn": Cell("EURNN", "eurnn", start=None, complex_numbers=True),
    "adam": Cell("constrained, StiefelAdam", "tagged", rule=PRINTED, rate=10.0),
    "rgd": Cell("constrained, ProjectedRGD", "tagged", rule=so.ProjectedRGD, rate=1000.0),
    "free": Cell("unconstrained", FREE),  # the cell of CWY, and its initialisation
    "lstm": Cell("LSTM"),
}
PAPER_CELLS = ["cwy", "expm", "dtriv-inf", "cayley", "lstm"]  # figures 1 and 4
TITLES = {cell.title: name for name, cell in CELLS.items()}
NAMES = {
    title.removeprefix("constrained, ").replace("unconstrained", "Free"): name
    for title, name in TITLES.items()
}  # on command lines


class SequenceModel(nn.Module):
    """A cell over ``(T, batch, inputs)`` and a linear read-out of all steps, or of the last.

    ``options`` holds hidden, lstm_hidden (or None), nonlinearity and start; input weights begin
    Gaussian with the deviation given.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, options: Namespace, *, deviation: float,
        last: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        cell, hidden, self.last = CELLS[name], options.hidden, last
        self.recurrent: nn.Module
        if cell.transition is None:
            hidden = options.lstm_hidden or hidden
            self.recurrent = nn.LSTM(inputs, hidden)
            with torch.no_grad():  # gates that begin open remember longer
                self.recurrent.bias_ih_l0[hidden : 2 * hidden] = 1.0
        else:
            self.recurrent = OrthogonalRNN(
                inputs,
                hidden,
                nonlinearity=options.nonlinearity,
                bias=False,
                dtype=torch.complex64 if cell.complex_numbers else None,
                transition=None if cell.transition == FREE else cell.transition,
                start=options.start if cell.start == "as asked" else cell.start,
                **cell.options,
            )
            nn.init.normal_(self.recurrent.weight_ih_l0, std=deviation)
        self.readout = nn.Linear(2 * hidden if cell.complex_numbers else hidden, outputs)
        nn.init.kaiming_normal_(self.readout.weight)
        nn.init.zeros_(self.readout.bias)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = self.recurrent(sequence)[0]
        hidden = hidden[-1] if self.last else hidden
        if hidden.is_complex():
            hidden = torch.view_as_real(hidden).flatten(-2)
        return self.readout(hidden)

    @torch.no_grad()
    def orthonormality_error(self) -> float | None:
        """|Q'Q - I| of the transition, the largest entry; None for an LSTM, which has none."""
        if isinstance(self.recurrent, nn.LSTM):
            return None
        wide = torch.complex128 if self.recurrent.weight_hh_l0.is_complex() else torch.float64
        transition = self.recurrent.weight_hh_l0.to(wide)
        identity = torch.eye(len(transition)).to(transition)
        return float((transition.mH @ transition - identity).abs().max())


class Both(torch.optim.Optimizer):
    """Two optimizers as one: an orthogonal weight by one rule, the others by another."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def by_two_rules(
    model: nn.Module,
    tagged: Sequence[nn.Parameter],
    rule: Callable[..., torch.optim.Optimizer],
    other: Callable[..., torch.optim.Optimizer],
) -> Both:
    """The tagged weights of a model move by one rule, all else that is trained by the other."""
    known = {id(weight) for weight in tagged}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return Both(rule(tagged), other(rest))


def build_optimizer(
    name: str, model: SequenceModel, rate: float, transition_rate: float
) -> torch.optim.Optimizer:
    """RMSprop, the transition with its own learning rate, or the rule of a tagged transition."""
    cell = CELLS[name]
    orthogonal = [
        parameter
        for key, parameter in model.recurrent.named_parameters()
        if cell.transition is not None and "weight_hh" in key
    ]
    transition_rate *= cell.rate
    other = partial(torch.optim.RMSprop, lr=rate)
    if cell.rule is not None:
        return by_two_rules(model, orthogonal, partial(cell.rule, lr=transition_rate), other)
    inner = {id(parameter) for parameter in orthogonal}
    others = [p for p in model.parameters() if id(p) not in inner]
    groups: list[dict[str, Any]] = [{"params": others}]
    if orthogonal:
        groups.append({"params": orthogonal, "lr": transition_rate})
    return other(groups)


def add_cell_flags(parser: ArgumentParser, hidden: int, start: str) -> None:
    """Add the flags of everything above."""
    add = parser.add_argument
    add("--cells", nargs="+", default=["CWY", "StiefelAdam", "LSTM"], metavar="CELL",
        help=f"of {', '.join(NAMES)}, or all")  # fmt: skip
    add("--hidden", type=int, default=hidden, help="units")
    add("--lstm-hidden", type=int, help="units of the LSTM; by default as many")
    add("--lr", type=float, default=1e-3, help="of RMSprop")
    add("--transition-lr", type=float, default=1e-4, help="of an orthogonal transition")
    add("--decay", choices=["cosine", "none"], default="cosine", help="of all learning rates")
    add("--start", choices=["henaff", "helfrich"], default=start, help="of the transition")
    parser.set_defaults(nonlinearity="modrelu")


def parse_cells(names: Sequence[str]) -> list[str]:
    """The titles of cells given by name, as in the tables; ``all`` is every one."""
    known = {name.lower(): cell for name, cell in NAMES.items()} | {name: name for name in CELLS}
    if "all" in names:
        return [cell.title for cell in CELLS.values()]
    for name in names:
        if name.lower() not in known:
            raise SystemExit(f"--cells must be of {', '.join(NAMES)} or all, got {name}")
    return [CELLS[name].title for name in dict.fromkeys(known[name.lower()] for name in names)]
