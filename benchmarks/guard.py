"""Our steps over those of others, compared with the ratios on file: has a step become slower?

A step and its rival are timed in turn within the same rounds, so that a ratio hardly depends on
what else the machine does; it does depend on the kind of machine, hence the tolerance. A ratio
that is beyond its tolerance is measured once more before it counts. Beside every ratio stand the
quartiles over the rounds and the errors max |X'X - I| after all these steps; an error beyond
`MOST` fails as well.

    python -m benchmarks.guard             # measure and print
    python -m benchmarks.guard --check     # exit with 1 where a ratio on file is exceeded
    python -m benchmarks.guard --update    # write benchmarks/results/guard.json
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import stiefel_opt as so
from benchmarks.common.harness import (
    RESULTS,
    Contestant,
    interleave,
    machine,
    markdown_table,
    orthonormality_error,
    write_json,
)
from benchmarks.speed import contestants

MOST = 1e-5  # error of our float32 matrices
CPU = torch.device("cpu")
MANY = contestants.Row("many", parameters=48, batch=1, n=384, m=32)
LARGE = contestants.Row("large", parameters=1, batch=1, n=1024, m=256)
HEADS = contestants.Row("heads", parameters=4, batch=12, n=384, m=32, heads=True)


@dataclass(frozen=True)
class Timed:
    """A step to time, and the matrices that it leaves; None where they are not orthonormal."""

    contestant: Contestant
    matrices: Callable[[], Tensor] | None = None

    def error(self) -> float | None:
        return None if self.matrices is None else orthonormality_error(self.matrices())


@dataclass(frozen=True)
class Pair:
    """Our step and its rival: by how much may their ratio exceed the one on file?"""

    name: str
    build: Callable[[], tuple[Timed, Timed]]
    tolerance: float = 1.3


def optimizers(row: contestants.Row, ours: str, rival: str) -> tuple[Timed, Timed]:
    """Two optimizers of `step_time` on the same matrices."""
    entries = [*contestants.ours(row, CPU), *contestants.rivals(row, CPU)]
    found = {entry.contestant.name: entry for entry in entries}
    mine, other = found[ours], found[rival]
    return Timed(mine.contestant, mine.matrices), Timed(other.contestant, other.matrices)


def beside_torch(constrained: bool) -> tuple[Timed, Timed]:
    """StiefelAdam on constrained or plain parameters, beside torch's Adam on plain ones."""
    tag = so.ManifoldParameter if constrained else nn.Parameter
    ours = partial(so.StiefelAdam, lr=1e-3, stiefel=constrained)
    torchs = partial(torch.optim.Adam, lr=1e-3)
    mine = contestants.enter("ours", MANY, CPU, contestants.single, tag, ours)
    other = contestants.enter("torch", MANY, CPU, contestants.single, nn.Parameter, torchs)
    return Timed(mine.contestant, mine.matrices if constrained else None), Timed(other.contestant)


def layers(register: Callable[[nn.Module], Any]) -> tuple[Timed, Timed]:
    """Forward, backward and step of one linear layer: ours, and torch's parametrization."""

    def training(name: str, constrain: Callable[[nn.Module], Any], rule: Any) -> Timed:
        layer = nn.Linear(32, 512, bias=False)
        constrain(layer)
        optimizer = rule(layer.parameters(), lr=1e-3)
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))

        def step() -> None:
            optimizer.zero_grad()
            layer(inputs).square().mean().backward()
            optimizer.step()

        return Timed(Contestant(name, step), lambda: layer.weight.detach().double())

    ours = so.StiefelAdam if register is so.constrain else torch.optim.Adam
    other = training("torch", parametrizations.orthogonal, torch.optim.Adam)
    return training("ours", register, ours), other


SGD = contestants.SGD, contestants.GEOOPT_SGD
ADAM = contestants.ADAM, contestants.GEOOPT_ADAM
POGO = contestants.SGD, contestants.POGO
PAIRS = (
    Pair("StiefelSGD / geoopt SGD, 48 of 384 x 32", partial(optimizers, MANY, *SGD)),
    Pair("StiefelAdam / geoopt Adam, 48 of 384 x 32", partial(optimizers, MANY, *ADAM)),
    Pair("StiefelAdam / geoopt Adam, 4 of 12 heads", partial(optimizers, HEADS, *ADAM)),
    Pair("StiefelSGD / POGO, 1024 x 256", partial(optimizers, LARGE, *POGO)),
    Pair("StiefelAdam / torch Adam, 48 of 384 x 32", partial(beside_torch, True), 1.6),
    Pair("StiefelAdam / torch Adam, 48 plain ones", partial(beside_torch, False), 1.6),
    Pair("so.constrain / torch orthogonal, 512 x 32", partial(layers, so.constrain), 1.6),
    Pair("so.orthogonal / torch orthogonal, 512 x 32", partial(layers, so.orthogonal), 1.6),
)


def measure(pair: Pair, rounds: int) -> dict[str, Any]:
    """Time one pair."""
    torch.manual_seed(0)
    ours, rival = pair.build()
    timings = interleave([ours.contestant, rival.contestant], rounds=rounds, device=CPU)
    names = ours.contestant.name, rival.contestant.name
    return {
        "ratio": timings.ratio(*names),
        "quartiles": timings.ratio_quartiles(*names),
        "tolerance": pair.tolerance,
        "error": ours.error(),
        "rival_error": rival.error(),
    }


def complaints(found: Mapping[str, Any], on_file: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with one measured row, in words."""
    said = []
    if found["error"] is not None and not found["error"] <= MOST:
        said.append(f"error {found['error']:.1e} > {MOST:.0e}")
    if on_file is None:
        said.append("not on file: run --update")
    elif found["ratio"] > (limit := on_file["ratio"] * on_file["tolerance"]):
        said.append(f"ratio {found['ratio']:.3g} > {limit:.3g}")
    return said


def table_of(results: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Any]) -> str:
    header = ["our step / the other's", "ratio", "quartiles", "on file", "limit"]
    header += ["error", "error of the other"]
    rows = []
    for name, found in results.items():
        file = stored.get(name)
        limit = None if file is None else file["ratio"] * file["tolerance"]
        ratios = [found["ratio"], None if file is None else file["ratio"], limit]
        ratio, kept, most = ("-" if value is None else f"{value:.2g}" for value in ratios)
        errors = (found["error"], found["rival_error"])
        spread = " - ".join(f"{value:.2g}" for value in found["quartiles"])
        shown = ("-" if error is None else f"{error:.0e}" for error in errors)
        rows.append([name, ratio, spread, kept, most, *shown])
    return markdown_table(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail where a ratio is exceeded")
    parser.add_argument("--update", action="store_true", help="write the ratios to the file")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--file", type=Path, default=RESULTS / "guard.json")
    options = parser.parse_args(argv)
    if options.check and options.update:
        parser.error("--check compares with the file that --update replaces; give one of them")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="geoopt")
    stored: dict[str, Any] = {}
    if options.file.exists():
        stored = json.loads(options.file.read_text(encoding="utf-8"))["results"]
    results, failed = {}, {}
    for pair in PAIRS:
        found = measure(pair, options.rounds)
        if options.check and complaints(found, stored.get(pair.name)):
            found = measure(pair, 2 * options.rounds)
        results[pair.name] = found
        failed[pair.name] = complaints(found, stored.get(pair.name))
    print(table_of(results, stored))
    if options.update:
        content = {
            "machine": machine(CPU),
            "settings": {"dtype": "float32", "rounds": options.rounds, "threads": 1},
            "tables": {"ratios": table_of(results, results)},
            "results": results,
        }
        write_json(options.file, content)
    if options.check:
        for name, said in failed.items():
            if said:
                print(f"{name}: {'; '.join(said)}", file=sys.stderr)
        return int(any(failed.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
