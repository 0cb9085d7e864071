"""Why orthonormal weights: three pictures, each beside the same network unconstrained.

    python -m benchmarks.accuracy.why --folder DIR  # all runs, one after the other
    python -m benchmarks.accuracy.why --folder DIR --pictures copying --sizes 100 --seeds 0 1 2
    python -m benchmarks.accuracy.why --folder DIR --merge  # writes what is there

copying    Ten digits are repeated after T zeros by a recurrent network of 64 units with modReLU and
           the initialisation of Henaff et al. (2016): share of the digits that are right.
deep       A tanh network of 20 or 50 layers of width 64, without normalisation, tells digits apart:
           accuracy, and singular values of the Jacobian of the last layer by the first input.
queries    Two blocks of self-attention, four heads of 16, read digits row by row, without
           normalisation of queries and keys, over their learning rate; all else has one that
           serves it: accuracy, the largest logit, and the noise in the gradient by the logits,
           see `logit_noise`.

Each method trains at nine learning rates, which fall to zero along a cosine, with Adam or, where
weights are tagged, StiefelAdam(radius=1.0, nesterov=False); also with StiefelAdam adaptive, and
unconstrained with the adaptive rule; the recurrent network also by default. Methods of one seed
see the same data in the same order, and have the same initialisation where their name says so. The
tables call the learning rate best that has the largest share in the same runs. A run is a file in
the folder and is not repeated while that is there.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import stiefel_opt as so
from benchmarks.accuracy import why_tables
from benchmarks.common import figures, harness
from benchmarks.papers.likhosherstov.copying import DIGITS, SYMBOLS, draw
from stiefel_opt.nn import OrthogonalRNN

RATES = [float(f"{10 ** (power / 2):.2g}") for power in range(-10, -1)]  # 1e-5 to 1e-1
WIDTH, HEADS = 64, 4
REST = 3.2e-3  # learning rate of all else where that of queries and keys is swept


class Picture(NamedTuple):
    """What is compared: methods and sizes; steps of a training, examples in a step."""

    methods: tuple[str, ...]
    sizes: tuple[int, ...]
    steps: int
    batch: int


PICTURES = {
    "copying": Picture(
        ("tagged", "cwy", "free", "lstm", "clipped", "virtual", "adaptive", "free-adaptive"),
        (100, 300),
        300,
        32,
    ),
    "deep": Picture(
        ("tagged", "free", "gaussian", "default", "adaptive", "free-adaptive"), (20, 50), 200, 64
    ),
    "queries": Picture(("tagged", "free", "default", "adaptive", "free-adaptive"), (2,), 200, 64),
}
# Names of the weights that are constrained, or that have the learning rate of the picture.
WEIGHTS = {"copying": r"weight_hh", "deep": r"layers\..*weight", "queries": r"\.[qk]\.weight"}


class Run(NamedTuple):
    """One training: ``size`` is T, or the number of layers."""

    picture: str
    size: int
    seed: int
    method: str
    rate: float

    @property
    def name(self) -> str:
        return f"{self.picture}-{self.size}-{self.method}-{self.rate:g}-{self.seed}"


class AdaptiveAdam(torch.optim.Adam):
    """The rule of ``AdaptiveAdam`` without the constraint, for the first group; Adam
    for the others. Letters are those of `methods.adaptive_adam`."""

    def __init__(self, params: list[dict[str, Any]], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.frictions = {p: Friction(p) for p in self.param_groups[0]["params"]}

    def step(self, closure: Any = None) -> Any:
        for parameter, friction in self.frictions.items():
            with torch.no_grad():
                parameter.add_(friction.move(parameter.grad), alpha=self.param_groups[0]["lr"])
            parameter.grad = None
        return super().step(closure)


class Friction:
    """State of one unconstrained weight under the adaptive rule."""

    def __init__(self, weight: Tensor) -> None:
        self.velocity, self.square = torch.zeros_like(weight), torch.zeros_like(weight)
        self.slope, self.factor, self.count = 0.0, 1.0, 0

    def move(self, grad: Tensor) -> Tensor:
        """Return the step, for a learning rate of 1."""
        self.count += 1
        self.square = torch.lerp(self.square, grad.square(), 0.001)
        divided = grad / ((self.square / (1 - 0.999**self.count)).sqrt() + 1e-8)
        b, minus_s = float((grad * divided).sum()), -float((grad * self.velocity).sum())
        part = minus_s / self.slope if self.slope > 0 else 0.0
        self.factor = min(max(self.factor * math.exp(0.2 * min(max(part, -0.7), 0.7)), 0.1), 1e6)
        bound = b / (self.slope - minus_s) if self.slope > minus_s else math.inf
        momentum = min(bound, 0.9)
        self.slope = momentum * self.slope if bound < 0.9 else b + momentum * minus_s
        self.velocity = momentum * self.velocity - divided
        return self.factor * 0.1 / (1 - 0.9**self.count) * self.velocity


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "tagged": harness.PRINTED,
    "virtual": so.StiefelAdam,
    "adaptive": partial(so.AdaptiveAdam, transport="projected"),
}


def optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    other = AdaptiveAdam if run.method == "free-adaptive" else torch.optim.Adam
    kind = RULES.get(run.method, other)
    if run.picture != "queries" and kind is not AdaptiveAdam:
        return kind(model.parameters(), lr=run.rate)
    is_chosen = re.compile(WEIGHTS[run.picture]).search
    chosen = [p for name, p in model.named_parameters() if is_chosen(name)]
    rest = [p for name, p in model.named_parameters() if not is_chosen(name)]
    rest_rate = REST if run.picture == "queries" else run.rate
    return kind([{"params": chosen, "lr": run.rate}, {"params": rest}], lr=rest_rate)


def train(
    run: Run, model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], steps: int
) -> Iterator[int]:
    """Take the steps and give their number after each; end when loss or weights overflow."""
    rule = optimizer(run, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rule, steps)
    for step, (inputs, answers) in enumerate(itertools.islice(batches, steps), start=1):
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), answers.flatten())
        if not loss.isfinite():
            return
        rule.zero_grad()
        loss.backward()
        if run.method == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rule.step()
        schedule.step()
        yield step


def moments(steps: int) -> set[int]:
    return {math.ceil(steps * part / 4) for part in range(1, 5)}


# ---- copying -------------------------------------------------------------------------------------


class Copier(nn.Module):
    """A cell without biases but those of the LSTM, and a linear read-out of every step."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.cell: nn.Module
        if method == "lstm":
            self.cell = nn.LSTM(SYMBOLS, WIDTH)
            with torch.no_grad():  # gates that begin open remember longer
                self.cell.bias_ih_l0[WIDTH : 2 * WIDTH] = 1.0
        else:
            transition = "tagged" if method in RULES else "cwy" if method == "cwy" else None
            self.cell = OrthogonalRNN(
                SYMBOLS,
                WIDTH,
                nonlinearity="modrelu",
                bias=False,
                transition=transition,
                start="henaff",
            )
            nn.init.normal_(self.cell.weight_ih_l0, std=math.sqrt(2 / SYMBOLS))
        self.readout = nn.Linear(WIDTH, SYMBOLS - 1)

    def forward(self, sequence: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(sequence, SYMBOLS).float()
        return self.readout(self.cell(one_hot)[0])


def copying(run: Run, steps: int) -> dict[str, Any]:
    torch.manual_seed(run.seed)
    model = Copier(run.method)
    generator = torch.Generator().manual_seed(run.seed)
    held_out, wanted = draw(256, run.size, torch.Generator().manual_seed(2**31))

    def right() -> float:
        with torch.no_grad():
            reached = model(held_out)[-DIGITS:]
        share = (reached.argmax(-1) == wanted[-DIGITS:]).float().mean()
        return float(share) if reached.isfinite().all() else 1 / 8

    batches = (draw(PICTURES[run.picture].batch, run.size, generator) for _ in itertools.count())
    history, last = [], 0
    for last in train(run, model, batches, steps):
        if last in moments(steps):
            history.append(right())
    content = {"accuracy": history[-1] if last == steps else 1 / 8, "history": history}
    if run.method != "lstm" and model.cell.weight_hh_l0.isfinite().all():
        values = torch.linalg.svdvals(model.cell.weight_hh_l0.detach().double())
        content["singular_values"] = [float(values.min()), float(values.max())]
    return content | {"steps": last}


# ---- digits of scikit-learn ----------------------------------------------------------------------


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,437 images and labels to train on, 360 to test; pixels have mean 0 and variance 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.data, dtype=torch.float32)[order]
    labels = torch.tensor(data.target)[order]
    pixels = (pixels - pixels[:1437].mean()) / pixels[:1437].std()
    return pixels[:1437], labels[:1437], pixels[1437:], labels[1437:]


def epochs(inputs: Tensor, labels: Tensor, run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(run.seed)
    count = PICTURES[run.picture].batch
    while True:
        for chosen in torch.randperm(len(inputs), generator=generator).split(count):
            if len(chosen) == count:
                yield inputs[chosen], labels[chosen]


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        reached = model(inputs)
    return float((reached.argmax(-1) == labels).float().mean()) if reached.isfinite().all() else 0.1


class Plain(nn.Module):
    """``depth`` layers x -> tanh(W x + b) of width 64, and a linear read-out."""

    def __init__(self, method: str, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.readout = nn.Linear(WIDTH, 10)
        for layer in self.layers:
            if method in (*RULES, "free", "free-adaptive"):
                nn.init.orthogonal_(layer.weight)
            elif method == "gaussian":
                nn.init.normal_(layer.weight, std=WIDTH**-0.5)
            if method != "default":
                nn.init.zeros_(layer.bias)
            if method in RULES:
                so.constrain(layer, "weight")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.readout(x)

    @torch.no_grad()
    def jacobian(self, inputs: Tensor) -> list[float]:
        """Smallest, median, largest singular value of d tanh(...) / dx: means of logarithms."""
        x = inputs.double()
        product = torch.eye(WIDTH, dtype=x.dtype).expand(len(x), -1, -1)
        for layer in self.layers:
            weight, bias = layer.weight.double(), layer.bias.double()
            x = (x @ weight.T + bias).tanh()
            product = (1 - x.square())[..., None] * (weight @ product)
        if not product.isfinite().all():
            return [math.nan] * 3
        values = torch.linalg.svdvals(product).clamp_min(1e-300).log()
        chosen = (values[:, -1], values.median(-1).values, values[:, 0])
        return [math.exp(float(value.mean())) for value in chosen]


def deep(run: Run, steps: int) -> dict[str, Any]:
    inputs, labels, held_out, wanted = images()
    torch.manual_seed(run.seed)
    model = Plain(run.method, run.size)
    last = max(train(run, model, epochs(inputs, labels, run), steps), default=0)
    return {
        "accuracy": accuracy(model, held_out, wanted) if last == steps else 0.1,
        "jacobian": model.jacobian(held_out[:32]),
        "steps": last,
    }


class Attention(nn.Module):
    """Self-attention in heads; ``shift`` is added to the logits of every image, and is zero."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for layer in (self.q, self.k):
            if method != "default":
                for block in layer.weight.detach().chunk(HEADS):
                    nn.init.orthogonal_(block)
            if method in RULES:
                so.constrain(layer, "weight", heads=HEADS)
        self.shift = torch.zeros(HEADS, 8, 8, requires_grad=True)
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        logits = q @ k.mT / math.sqrt(q.size(-1)) + self.shift
        self.largest = float(logits.detach().abs().max())
        return self.o((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """The eight rows of an image as tokens; blocks as in a vision transformer."""

    def __init__(self, method: str, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(8, WIDTH))
        self.attention = nn.ModuleList(Attention(method) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * depth + 1))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.readout = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unflatten(-1, (8, 8))) + self.places
        for place, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * place](x))
            x = x + mlp(self.norms[2 * place + 1](x))
        return self.readout(self.norms[-1](x).mean(1))


def logit_noise(model: Reader, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    """The noise of the gradient in the attention logits over minibatches of 64, and the loss.

    A minibatch's gradient by the logits is that by one number added to the logit of a head, a query
    and a key in all its images. Over minibatches it has a mean and a standard deviation for each
    such place; ``noise`` and ``signal`` are their root mean squares over places.
    """
    shifts = [attention.shift for attention in model.attention]
    gradients, losses, largest = [], [], 0.0
    for chosen in torch.arange(16 * 64).split(64):
        loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
        found = torch.autograd.grad(loss, shifts)
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        losses.append(float(loss.detach()))
        largest = max(largest, *(attention.largest for attention in model.attention))
    stacked = torch.stack(gradients)
    return {
        "loss": statistics.fmean(losses),
        "largest_logit": largest,
        "noise": float(stacked.var(0).mean().sqrt()),
        "signal": float(stacked.mean(0).square().mean().sqrt()),
    }


def attention(run: Run, steps: int) -> dict[str, Any]:
    inputs, labels, held_out, wanted = images()
    torch.manual_seed(run.seed)
    model = Reader(run.method, run.size)
    history, last = [{"step": 0, **logit_noise(model, inputs, labels)}], 0
    for last in train(run, model, epochs(inputs, labels, run), steps):
        if last in moments(steps):
            history.append({"step": last, **logit_noise(model, inputs, labels)})
    share = accuracy(model, held_out, wanted) if last == steps else 0.1
    return {"accuracy": share, "history": history, "steps": last}


# ---- runs ----------------------------------------------------------------------------------------

WORK = {"copying": copying, "deep": deep, "queries": attention}


def runs(options: argparse.Namespace) -> list[Run]:
    """In an order in which whole pictures are there early: seed by seed, the smaller size first."""
    found = [
        Run(name, size, seed, method, rate)
        for name in options.pictures
        for size in PICTURES[name].sizes
        for seed in options.seeds
        for method in PICTURES[name].methods
        for rate in RATES
        if size in (options.sizes or PICTURES[name].sizes)
        and method in (options.methods or PICTURES[name].methods)
    ]
    return sorted(found, key=lambda run: run.method == "clipped")  # the remedy last


def work(run: Run, folder: Path, steps: int | None) -> None:
    path = folder / f"{run.name}.json"
    if path.exists():
        return
    started = time.process_time()
    content = WORK[run.picture](run, steps or PICTURES[run.picture].steps)
    seconds = round(time.process_time() - started, 2)
    harness.write_json(path, run._asdict() | content | {"processor_seconds": seconds})
    print(run.name, f"{content['accuracy']:.3f}", f"{seconds:.1f} s", flush=True)


def merge(folder: Path) -> None:
    """Write values, tables and pictures of every method and seed that is whole."""
    values = why_tables.collect([json.loads(p.read_text()) for p in folder.glob("*.json")], RATES)
    content = {
        "machine": harness.machine(),
        "setting": {"rates": RATES, "rate of the rest": REST}
        | {name: picture._asdict() for name, picture in PICTURES.items()},
        "tables": why_tables.tables(values, RATES),
        "values": values,
    }
    harness.write_json(harness.RESULTS / "why.json", content)
    print("\n\n".join(content["tables"].values()))
    figures.why(harness.RESULTS / "why.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/why"), help="for the runs")
    add("--pictures", nargs="+", choices=list(PICTURES), default=list(PICTURES))
    add("--sizes", type=int, nargs="+", help="of T, or of layers; default: all")
    add("--methods", nargs="+", help="default: all")
    add("--seeds", type=int, nargs="+", default=list(range(5)))
    add("--steps", type=int, help="instead of those of the picture, to try it out")
    add("--threads", type=int, default=1)
    add("--merge", action="store_true", help="run nothing, write tables and plots")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    if options.merge:
        merge(options.folder)
        return
    harness.keep_settings(options.folder, {"steps": options.steps})
    for run in runs(options):
        work(run, options.folder, options.steps)


if __name__ == "__main__":
    main()
