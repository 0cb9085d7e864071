"""What the recurrent modules cost beside the loops that one would write without them.

**OrthogonalRNN** at N = 512 and 784 steps (an image of 28 x 28, pixel by pixel): forward and
backward of the whole module, the map to the orthogonal matrix included, against the same loop with
an unconstrained weight, ``h = tanh(x + h @ W.T)`` under autograd with the input products done at
once, and against ``torch.nn.RNN``. Beside each time: max |Q'Q - I| of the transition, in float64,
and for CWY how far the outputs are from a float64 loop with the transition formed.

**delta_product** at T = 2048, d = 64 and two factors a token: forward and backward against the loop
over tokens and factors under autograd, in its cheapest form, two matrix-vector products a factor.
Beside each time: the largest difference from the loop in float64, relative to its largest output.

**Factors a token**: the same with 1, 2, 4 and 8 factors, times and flops over those of one factor.

    python -m benchmarks.speed.modules  # a few minutes
    python -m benchmarks.speed.modules --rows delta --add  # keeps the other rows of the file
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import harness
from stiefel_opt.nn import OrthogonalRNN, delta_product

HIDDEN, STEPS = 512, 784
FREE, TORCH = "unconstrained weight, loop", "unconstrained weight, nn.RNN"
TRANSITIONS: dict[str, dict[str, Any]] = {
    "tagged": {"transition": "tagged"},
    "CWY, L = N": {"transition": "cwy"},
    "CWY, L = 128": {"transition": "cwy", "reflections": 128},
    "exponential": {"transition": "matrix_exp"},
    "unconstrained weight, ours": {"transition": None},
}
TOKENS, SIZE, FACTORS = 2048, 64, 2
LOOP, CHUNKS = "loop", "chunk-wise"


class FreeLoop(nn.Module):
    """The loop that OrthogonalRNN is measured against: nothing but an unconstrained weight."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, size)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(size, size)))

    def forward(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        hidden = sequence.new_zeros(sequence.size(1), len(self.weight))
        outputs = []
        for entering in self.input(sequence):
            hidden = torch.tanh(entering + hidden @ self.weight.mT)
            outputs.append(hidden)
        return torch.stack(outputs), hidden.unsqueeze(0)


def forward_and_backward(module: nn.Module, sequence: Tensor) -> Callable[[], None]:
    """One pass as in training, with a loss that looks at every output."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(*sequence.shape[:2], HIDDEN, generator=generator).to(sequence.device)

    def call() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        (module(sequence)[0] * weights).sum().backward()

    return call


@torch.no_grad()
def rnn_errors(module: nn.Module, sequence: Tensor) -> dict[str, float]:
    """Orthonormality of the transition, and the outputs against a float64 loop with it formed."""
    if not isinstance(module, OrthogonalRNN) or module.transition is None:
        return {}
    transition = module.weight_hh_l0.detach().double()
    hidden = sequence.new_zeros(sequence.size(1), HIDDEN).double()
    bias = (module.bias_ih_l0 + module.bias_hh_l0).double()
    entering = sequence.double() @ module.weight_ih_l0.double().mT + bias
    worst = 0.0
    for step, output in zip(entering, module(sequence)[0], strict=True):
        hidden = torch.tanh(step + hidden @ transition.mT)
        worst = max(worst, float((hidden - output).abs().max()))
    return {
        "orthonormality_error": harness.orthonormality_error(transition),
        "output_error": worst,
    }


def measure_rnn(batch: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time all transitions on sequences of single pixels."""
    torch.manual_seed(0)
    sequence = torch.randn(STEPS, batch, 1).to(device)
    modules: dict[str, nn.Module] = {FREE: FreeLoop(1, HIDDEN), TORCH: nn.RNN(1, HIDDEN)}
    modules |= {name: OrthogonalRNN(1, HIDDEN, **row) for name, row in TRANSITIONS.items()}
    contestants = [
        harness.Contestant(name, forward_and_backward(module.to(device), sequence))
        for name, module in modules.items()
    ]
    timings = harness.interleave(contestants, rounds=rounds, device=device)
    found, lines = {}, []
    for name, module in modules.items():
        row = found[name] = timings.summary(name) | rnn_errors(module, sequence)
        row["ratio"] = timings.ratio(name, FREE)
        row["ratio_quartiles"] = timings.ratio_quartiles(name, FREE)
        line = [name, f"{row['median_ms']:.0f}", f"{row['ratio']:.2f}"]
        line.append("{:.2f} - {:.2f}".format(*row["ratio_quartiles"]))
        errors = (row.get(key) for key in ("orthonormality_error", "output_error"))
        lines.append([*line, *("-" if error is None else f"{error:.0e}" for error in errors)])
    header = (f"N = {HIDDEN}, {STEPS} steps, batch {batch}", "ms", "over the unconstrained loop")
    header = (*header, "quartiles", "|Q'Q - I|", "error of outputs")
    return {"contestants": found, "table": harness.markdown_table(header, lines)}


def delta_loop(queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor) -> Tensor:
    """Token by token and factor by factor, each factor as a rank-one update of the state."""
    state = values.new_zeros(*values.shape[:-3], keys.size(-1), values.size(-1))
    outputs = []
    tokens = zip(
        queries.unbind(-2), keys.unbind(-3), values.unbind(-3), strengths.unbind(-2), strict=True
    )
    for query, token_keys, token_values, token_strengths in tokens:
        for key, value, strength in zip(
            token_keys.unbind(-2), token_values.unbind(-2), token_strengths.unbind(-1), strict=True
        ):
            column = key.unsqueeze(-1)
            change = strength[..., None, None] * (value.unsqueeze(-2) - column.mT @ state)
            state = state + column * change
        outputs.append((query.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=-2)


def delta_inputs(batch: int, factors: int, device: torch.device) -> list[Tensor]:
    """Queries, keys, values and strengths of all tokens, drawn with one seed."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, TOKENS, *shape, generator=generator).to(device)

    inputs = [random(SIZE), normalize(random(factors, SIZE), dim=-1), random(factors, SIZE)]
    return [part.requires_grad_() for part in (*inputs, 2 * torch.sigmoid(random(factors)))]


def chunks(*inputs: Tensor) -> Tensor:
    """The outputs of `delta_product`."""
    return delta_product(*inputs)[0]


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Forward and backward, with a loss that looks at every output."""
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    weights = weights.to(inputs[0].device)
    return lambda: torch.autograd.grad((function(*inputs) * weights).sum(), inputs)


def measure_delta(batch: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time the chunk-wise form and the loop, gradients with respect to everything."""
    inputs = delta_inputs(batch, FACTORS, device)
    functions: dict[str, Callable[..., Tensor]] = {LOOP: delta_loop, CHUNKS: chunks}
    contestants = [
        harness.Contestant(name, gradients(function, inputs))
        for name, function in functions.items()
    ]
    timings = harness.interleave(contestants, rounds=rounds, device=device)
    with torch.no_grad():
        exact = delta_loop(*(part.double() for part in inputs))
        errors = {
            name: float((function(*inputs) - exact).abs().max() / exact.abs().max())
            for name, function in functions.items()
        }
        rounded = functions[CHUNKS](*(part.double() for part in inputs)) - exact
    ratio, spread = timings.ratio(LOOP, CHUNKS), timings.ratio_quartiles(LOOP, CHUNKS)
    found = {name: timings.summary(name) | {"error": errors[name]} for name in functions}
    double = float(rounded.abs().max())
    found[CHUNKS] |= {"ratio": ratio, "ratio_quartiles": spread, "error_in_float64": double}
    times = [f"{found[name]['median_ms']:.1f}" for name in functions]
    lines = [
        [LOOP, times[0], "1", "-", f"{errors[LOOP]:.0e}", "-"],
        [CHUNKS, times[1], f"{ratio:.0f}", "{:.0f} - {:.0f}".format(*spread)],
    ]
    lines[1] += [f"{errors[CHUNKS]:.0e}", f"{double:.0e}"]
    header = (f"T = {TOKENS}, d = {SIZE}, {FACTORS} factors, batch {batch}", "ms")
    header = (*header, "times faster", "quartiles", "error", "error in float64")
    return {"contestants": found, "table": harness.markdown_table(header, lines)}


def measure_factors(batch: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time the chunk-wise form with more and more factors a token."""
    inputs = {factors: delta_inputs(batch, factors, device) for factors in (1, 2, 4, 8)}
    calls = {str(factors): gradients(chunks, given) for factors, given in inputs.items()}
    contestants = [harness.Contestant(name, call) for name, call in calls.items()]
    timings = harness.interleave(contestants, rounds=rounds, device=device)
    found, lines = {}, []
    for factors, given in inputs.items():
        name = str(factors)
        with FlopCounterMode(display=False) as counter:
            calls[name]()
        with torch.no_grad():
            exact = delta_loop(*(part.double() for part in given))
            error = float((chunks(*given) - exact).abs().max() / exact.abs().max())
        row = found[name] = timings.summary(name)
        row |= {"flops": counter.get_total_flops(), "error": error}
        row["flops_ratio"] = row["flops"] / found["1"]["flops"]
        row["ratio"], row["ratio_quartiles"] = 1.0, (1.0, 1.0)
        if factors > 1:
            row["ratio"] = timings.ratio(name, "1")
            row["ratio_quartiles"] = timings.ratio_quartiles(name, "1")
        line = [name, f"{row['median_ms']:.1f}", f"{row['ratio']:.2f}"]
        line += ["{:.2f} - {:.2f}".format(*row["ratio_quartiles"])]
        lines.append([*line, f"{row['flops_ratio']:.2f}", f"{error:.0e}"])
    header = (f"factors; T = {TOKENS}, d = {SIZE}, batch {batch}", "ms", "time over one factor's")
    header = (*header, "quartiles", "flops over one factor's", "error")
    return {"contestants": found, "table": harness.markdown_table(header, lines)}


ROWS: dict[str, tuple[Callable[[int, int, torch.device], dict[str, Any]], int]] = {
    "delta": (measure_delta, 1),
    "factors": (measure_factors, 1),
    "rnn-batch-16": (measure_rnn, 16),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen rows, print and write."""
    parser = harness.flags(__doc__, "modules", rounds=7)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--add", action="store_true", help="keep the other rows of the file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    about = harness.machine(arguments.device)
    print(f"{about['processor']}, {arguments.threads} threads, on {about['device_name']}")
    settings = {"dtype": "float32", "rounds": arguments.rounds, "threads": arguments.threads}
    began, results = time.perf_counter(), []
    if arguments.add and arguments.output.exists():
        earlier = json.loads(arguments.output.read_text())["results"]
        results = [result for result in earlier if result["row"] not in arguments.rows]
    for name in arguments.rows:
        measure, batch = ROWS[name]
        results.append({"row": name, **measure(batch, arguments.rounds, arguments.device)})
        print(f"\n{results[-1]['table']}", flush=True)
        tables = {result["row"]: result["table"] for result in results}
        content = {"machine": about, "settings": settings, "tables": tables, "results": results}
        harness.write_json(arguments.output, content)
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes in all.")


if __name__ == "__main__":
    main()
