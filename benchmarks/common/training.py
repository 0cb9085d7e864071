"""A training loop that can be killed; runs of many methods and seeds."""

import itertools
import json
import math
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.common.harness import atomic, machine, write_json
from benchmarks.common.programs import announce

Record = dict[str, Any]  # the configuration of a finished run, its history and its machine


def check_configuration(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that was started with other settings."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise ValueError(
                f"--resume must keep {key} = {theirs.get(key)!r} of {name}, "
                f"got {value!r}; choose another --output, or drop --resume to start again"
            )


class Task(Protocol):
    """What a model learns. An epoch is ``steps`` batches, which need not be a pass over data."""

    steps: int

    def batches(self, generator: torch.Generator) -> Iterable[Any]:
        """The batches of one epoch; every random draw comes from the (CPU) generator."""

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """What is minimised, and detached numbers whose means over the epoch are recorded."""

    def evaluate(self) -> dict[str, float]:
        """What is recorded after an epoch; called in evaluation mode without gradients."""


class Trainer:
    """Trains for epochs, with a progress bar, a history and a checkpoint after each epoch.

    ``configuration`` holds ``epochs``, ``seed`` and whatever else the result depends on: a
    checkpoint of another configuration is refused, unless only ``epochs`` has grown: the run then
    goes on under the schedule of the longer one. ``counted`` is what a step handles, such as
    ("images", 32), for the speed; ``clip`` the largest norm of all gradients together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        configuration: dict[str, Any],
        path: Path,
        scheduler: torch.optim.lr_scheduler.LambdaLR | None = None,
        counted: tuple[str, int] = ("steps", 1),
        clip: float | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.task, self.configuration, self.path = task, configuration, path
        self.counted, self.clip = counted, clip
        self.generator = torch.Generator().manual_seed(configuration["seed"])
        self.history: list[dict[str, float]] = []

    def save(self) -> None:
        """Everything that the rest of the run depends on."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "generator": self.generator.get_state(),
            "global_generator": torch.get_rng_state(),  # dropout on a CPU
            "history": self.history,
            "configuration": self.configuration,
        }
        with atomic(self.path) as temporary:
            torch.save(state, temporary)

    def resume(self) -> None:
        """Go on after the last saved epoch, bit for bit as if nothing had happened in between."""
        device = next(self.model.parameters()).device
        state = torch.load(self.path, map_location=device, weights_only=True)
        theirs = state["configuration"]
        longer = {"epochs": max(theirs["epochs"], self.configuration["epochs"])}
        check_configuration(self.path.name, theirs | longer, self.configuration)
        with warnings.catch_warnings():  # a soft constraint is off the manifold, and known to be
            warnings.filterwarnings("ignore", ".*off the manifold")
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            done, groups = self.scheduler.last_epoch, self.optimizer.param_groups
            for group, factor in zip(groups, self.scheduler.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * factor(done)
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["global_generator"].cpu())
        self.history = state["history"]

    def step(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch; return what is to be recorded."""
        loss, measures = self.task.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return measures

    def train(self, title: str) -> None:
        """Train the epochs that are missing and save after each."""
        epochs, done, steps = self.configuration["epochs"], len(self.history), self.task.steps
        bar = tqdm(desc=title, total=epochs * steps, initial=done * steps, disable=None)
        for epoch in range(done + 1, epochs + 1):
            record = {"epoch": epoch, "step": epoch * steps} | self.train_epoch(bar)
            self.history.append(record)
            self.save()
            if bar.disable:  # a log file instead of a terminal
                known = {key: value for key, value in record.items() if value is not None}
                text = ", ".join(f"{key} {value:.4g}" for key, value in known.items())
                print(f"{title}: {text}", flush=True)
        bar.close()

    def train_epoch(self, bar: Any) -> dict[str, float]:
        """The batches of one epoch, then the evaluation."""
        sums: dict[str, Tensor] = {}
        self.model.train()
        unit, count = self.counted
        start, steps = time.perf_counter(), 0
        for batch in self.task.batches(self.generator):
            for name, value in self.step(batch).items():
                sums[name] = sums[name] + value if name in sums else value
            steps += 1
            bar.update()
            if steps % 20 == 0 and not bar.disable:  # not each step: reading a loss stalls a GPU
                speed = steps * count / (time.perf_counter() - start)
                means = [f"{name} {float(total) / steps:.4g}" for name, total in sums.items()]
                bar.set_postfix_str(", ".join([*means, f"{speed:.0f} {unit}/s"]))
        record = {name: float(total) / steps for name, total in sums.items()}
        record["seconds"] = time.perf_counter() - start  # training only; the sums have waited
        record[f"{unit}_per_second"] = steps * count / record["seconds"]
        self.model.eval()
        with torch.no_grad():
            return record | self.task.evaluate()


def train_all(
    options: Namespace,
    methods: Sequence[str],
    build: Callable[[str, int], Trainer],
    report: Callable[[Mapping[str, Sequence[Record]]], None],
    *,
    tidy: bool = False,
) -> dict[str, list[Record]]:
    """Train every method with every seed; ``report`` what is there now and then, and at the end.

    Finished runs are files in ``options.output / "runs"``, which ``--resume`` reads; ``tidy``
    removes their checkpoints, without which they cannot be made longer.
    """
    records: dict[str, list[Record]] = {}
    reported = time.monotonic()
    try:
        for seed, method in itertools.product(options.seeds, methods):
            stem = f"{method} seed {seed}".replace(" ", "-")
            path, trainer = options.output / "runs" / f"{stem}.json", build(method, seed)
            record = finished_run(path, trainer.configuration) if options.resume else None
            if record is None:
                path.unlink(missing_ok=True)
                record = train_one(trainer, f"seed {seed}, {method}", path, options.resume)
            if tidy:
                trainer.path.unlink(missing_ok=True)
            records.setdefault(method, []).append(record)
            if time.monotonic() - reported > 20:  # to draw takes a second
                report(records)
                reported = time.monotonic()
    finally:
        if records:
            report(records)
    return records


def compare(
    options: Namespace,
    methods: Sequence[str],
    build: Callable[[str, int], Trainer],
    report: Callable[[Mapping[str, Sequence[Record]]], None],
    what: str,
    *,
    tidy: bool = False,
) -> dict[str, list[Record]]:
    """Say what will be done, train everything, print the table."""
    announce(options, what)
    records = train_all(options, methods, build, report, tidy=tidy)
    print(f"\n{(options.output / 'table.md').read_text()}\nPictures: {options.output}")
    return records


def finished_run(path: Path, configuration: Record) -> Record | None:
    """The record of a run that is over, or None; a run of another configuration is refused."""
    if not path.exists():
        return None
    record: Record = json.loads(path.read_text())
    if record["epochs"] < configuration["epochs"]:
        return None
    check_configuration(path.name, record, configuration)
    return record


def train_one(trainer: Trainer, title: str, path: Path, resume: bool) -> Record:
    """Train to the end, from the checkpoint if asked to, and keep the record of the run."""
    if resume and trainer.path.exists():
        trainer.resume()
    trainer.train(title)
    record = trainer.configuration | {
        "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "history": trainer.history,
        "machine": machine(next(trainer.model.parameters()).device),
    }
    write_json(path, record, exact=True)
    return record


def rate_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up, then a cosine from 1 down to 1 %."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2
