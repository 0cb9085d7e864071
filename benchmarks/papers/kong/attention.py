"""When do orthonormal queries and keys help a small vision transformer?

    python -m benchmarks.papers.kong.attention --data-dir DIR --resume  # hours
    python -m benchmarks.papers.kong.attention --smoke  # on digits

Every case changes one thing of the first one, all methods have the paper's rates: no warm-up; four
times the rates; both; twelve layers of width 64; products in bfloat16; queries and keys with
singular values of sqrt(2), 2, or with a learned factor a layer. DIR holds CIFAR-10 or
cifar10_20k.npz. Runs are those of orthogonal_vit.py; "overflow" is a logit that is no number.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.harness import markdown_table
from benchmarks.common.programs import Help, add_flags, finish_flags, run, spread, write_table
from benchmarks.common.training import Record
from benchmarks.papers.kong import orthogonal_vit

SIZE = "--layers 3 --width 96 --heads 3 --feed-forward 96 --patch 8 --batch-size 128"
METHODS = {  # and the published rate
    "AdamW": ("adamw:none", 1e-3),
    "StiefelAdam": ("stiefel-adam:within", 1e-3),
    "SGD": ("sgd:none", 0.1),
    "StiefelSGD": ("stiefel-sgd:within", 0.15),
}
CASES = {  # by what learning rates are multiplied, and flags
    "as it is": (1, ""),
    "no warm-up": (1, "--warmup 0"),
    "four times the learning rates": (4, ""),
    "both": (4, "--warmup 0"),
    "12 layers of 64": (1, "--layers 12 --width 64 --heads 2 --feed-forward 64"),
    "bfloat16": (1, "--bfloat16"),
    "singular values 1.41": (1, "--scale 1.4142135623730951"),
    "singular values 2": (1, "--scale 2"),
    "learned factor": (1, "--scale learned"),
}


def train(case: str, options: Namespace) -> dict[str, list[Record]]:
    """The runs of each method in one case."""
    factor, own = CASES[case]
    methods = {
        name: f"{method}:{factor * rate:g}"
        for name, (method, rate) in METHODS.items()
        if "Stiefel" in name or "--scale" not in own  # nothing else is scaled
    }
    seeds = list(map(str, options.seeds))
    flags = SIZE.split() if options.data != "digits" else ["--smoke"]
    flags += ["--data", options.data, "--data-dir", str(options.data_dir), "--warmup", "2"]
    flags += ["--augment", "none" if options.data == "digits" else "crop-flip"]
    flags += ["--limit", str(options.limit), "--epochs", str(options.epochs)]
    flags += ["--seeds", *seeds] if len(seeds) > 1 else ["--seed", *seeds, "--seeds", "1"]
    flags += ["--threads", str(options.threads), "--device", options.device]
    flags += ["--resume"] if options.resume else []
    flags += ["--output", str(options.output / case.replace(" ", "-")), *own.split()]
    records = orthogonal_vit.main([*flags, "--methods", *methods.values()])
    names = {text.split(":")[0]: name for name, text in methods.items()}
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(names[record["optimizer"]], []).append(record)
    return found


def shown(values: Sequence[float]) -> str:
    """Mean and range over the seeds, "-" without any."""
    if not all(map(math.isfinite, values)):
        return "overflow"
    return spread(values, ".1f") if values else "-"


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main(argv: Sequence[str] | None = None) -> None:
    """Train every case; write test errors and largest logits, one table each."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=Help)
    add = parser.add_argument
    add("--data", default="cifar10", help="as of orthogonal_vit.py")
    add("--data-dir", type=Path, default=Path("data"), help="folder with the files")
    add("--limit", type=int, default=4000, help="training images")
    add("--epochs", type=int, default=20, help="passes over them")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is changed")
    add_flags(parser, Path("runs/attention"), seeds=3)
    if parser.parse_known_args(argv)[0].smoke:
        parser.set_defaults(data="digits", limit=64, epochs=1, seeds=[1])
    options = finish_flags(parser, parser.parse_args(argv))
    tables: dict[str, list[list[str]]] = {"test_error": [], "largest_logit": []}
    runs: list[Record] = []
    for case in options.cases:
        found = train(case, options)
        for key, rows in tables.items():
            ends = [[run["history"][-1][key] for run in found.get(name, [])] for name in METHODS]
            rows.append([case, *(shown(values) for values in ends)])
        for name, group in found.items():
            for one in group:
                last = {key: finite(one["history"][-1][key]) for key in tables}
                runs.append({"case": case, "method": name, "seed": one["seed"], **last})
        title = (
            f"Attention, {options.data}: {options.limit} images, {options.epochs} epochs, seeds "
            f"{', '.join(map(str, options.seeds))}"
        )
        texts = {
            label: markdown_table(["Case", *METHODS], tables[key])
            for key, label in (("test_error", "test error %"), ("largest_logit", "largest logit"))
        }
        text = "\n\n".join(f"{label}:\n\n{table}" for label, table in texts.items())
        write_table(options.output, title, text, {"tables": texts, "runs": runs})
    print((options.output / "table.md").read_text())


if __name__ == "__main__":
    run(main)
