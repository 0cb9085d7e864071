"""Count what the tests have tried, from what pytest reports: the table of trust in the README.

    pytest -rA > fast.log
    pytest -rA -m slow tests/test_kill.py tests/test_properties.py > slow.log
    python tests/count_checks.py fast.log slow.log

Only tests that have passed count, and none may have failed. How much one test tries is read from
the tests themselves.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import test_kill
import test_optim_loading
import test_properties
import torch
from hypothesis import settings

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "trust.json"
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (tests/\S+?::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One line of the table: which tests it sums up, and how much each of them tries."""

    tried: str
    outcome: str
    pattern: str
    each: int = 1


ROWS = (
    Row(
        "options, parameters, gradients and values that make no sense",
        "an error that names the parameter; nothing has changed",
        r"tests/test_optim_errors\.py::",
    ),
    Row(
        "gradients that are not finite, or overflow, at every optimizer",
        "it stays as it was, or an error names it; the others train on",
        r"tests/test_optim_nonfinite\.py::",
    ),
    Row(
        "checkpoints of another shape, reading, rule or version, or not complete",
        "an error; the optimizer trains on as if nothing had been",
        r"tests/test_optim_loading\.py::test_(what_is_refused|every_rule|subclasses)",
    ),
    Row(
        "truncated checkpoint files",
        "refused before they reach the optimizer",
        r"tests/test_optim_loading\.py::test_truncated",
        test_optim_loading.CUTS,
    ),
    Row(
        "drawn shapes, readings, dtypes, options, strides and gradients",
        "on the manifold, like single matrices, resumed bit for bit",
        r"tests/test_properties\.py::test_(it_|strides|every_matrix|a_checkpoint|projection)",
        settings.get_profile("short").max_examples,
    ),
    Row(
        "SIGKILL at a random moment of a training",
        "the weights of an undisturbed run, bit for bit",
        r"tests/test_kill\.py::test_a_run_killed",
        test_kill.KILLS,
    ),
    Row(
        "steps in float32",
        "max abs of X'X - I below 1e-5 throughout",
        r"tests/test_properties\.py::test_a_hundred_thousand_steps",
        test_properties.DRIFT_STEPS,
    ),
    Row(
        "steps of noisy trainings, 10,000 each, float64 to bfloat16",
        "X'X - I and X'U at rounding level at the end",
        r"tests/test_optim_(robustness\.py::test_invariants_hold|half\.py::test_no_drift)",
        10_000,
    ),
    Row(
        "trainings in Lightning, transformers, accelerate, timm, peft and as in SpinQuant",
        "like a plain loop, resumed bit for bit",
        r"tests/integrations/.*(resume|curves)",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path, help="what `pytest -rA` has printed")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    outcomes: dict[str, str] = {}
    for log in arguments.logs:
        found = OUTCOME.findall(log.read_text(encoding="utf-8", errors="replace"))
        outcomes.update({name: outcome for outcome, name in found})  # a later log wins
    bad = [name for name, outcome in outcomes.items() if outcome != "PASSED"]
    if bad:
        raise SystemExit("these have not passed:\n  " + "\n  ".join(bad))
    lines, counts = ["| Tried | Number | Outcome |", "|---|---:|---|"], {}
    for row in ROWS:
        tests = sum(bool(re.match(row.pattern, name)) for name in outcomes)
        if tests:
            counts[row.tried] = {"tests": tests, "each": row.each}
            lines.append(f"| {row.tried} | {tests * row.each:,} | {row.outcome} |")
    content = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "counts": counts,
        "tables": {"trust": "\n".join(lines)},
    }
    arguments.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
