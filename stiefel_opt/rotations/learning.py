"""Train the rotations of a frozen decoder against the noise of its own quantisation."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.optimizer import Optimizer

from stiefel_opt.errors import (
    ProgressBar,
    check_choice,
    check_counts,
    check_flags,
    check_range,
    check_type,
    fail,
)
from stiefel_opt.numerics import gram_error, local_part
from stiefel_opt.optim import StiefelAdam
from stiefel_opt.rotations.decoder import Decoder
from stiefel_opt.rotations.online import usable_decoder
from stiefel_opt.rotations.quantizers import (
    Quantizers,
    quantizers_of,
    warn_without_r4,
)
from stiefel_opt.rotations.result import Rotations, polished
from stiefel_opt.rotations.starts import around_ones, hadamard, inside_ones
from stiefel_opt.tags import ManifoldParameter

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

STEPS = 200  # at least, where `steps` is not given
ANGLES = {"noise": 0.1, "kl": 0.03, "ce": 0.03}  # lr, in radians; see `learn`
WATCHED = 4  # batches on which the learned rotations are compared with the initial ones
DRIFT = 5e-7  # error of R'R above which rounding is removed from a rotation
EVERY = 10  # steps between two checkpoints
MOST = 10_000  # batches drawn from an iterator of unknown length, where `steps` is not given


@torch.inference_mode(mode=False)  # so that it may be called where no graph is recorded
@torch.enable_grad()
def learn(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    start: Rotations | None = None,
    activation_bits: int | None = 4,
    kv_bits: int | None = None,
    weight_bits: int | None = None,
    weight_group: int | None = None,
    symmetric: bool = False,
    loss: str = "noise",
    top_k: int | None = None,
    optimizer: OptimizerFactory | None = None,
    steps: int | None = None,
    lr: float | None = None,
    gradient_checkpointing: bool = False,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Rotations:
    r"""Learn the rotations under which quantisation changes a model least.

    .. math::
        \min_{R_1, R_2^{(1)}, \dots, R_2^{(L)}} \;
        \sum_{x} \frac{s(x R)^2}{12 |x|^2 / n}
        \qquad \text{or} \qquad \mathrm{KL}\big(p \,\|\, \hat p_R\big)

    over orthogonal matrices: the noise of rounding relative to each row x of n entries that is
    rounded, s the step of its grid; or the divergence of the next token's distribution in full
    precision from that of the model rounded in the rotated basis, as :func:`quantized` does. Of the
    model nothing is trained.

    Args:
        model: A model that :func:`prepare_` has prepared, or any where ``start`` has no R1, in any
            floating-point dtype, on any device; bare, in ``DistributedDataParallel``, or after
            ``fully_shard``.
        batches: Token ids ``(batch, tokens)``, or dicts with ``input_ids`` and perhaps
            ``attention_mask``, whose zeros no loss counts: a list, a data loader; with ``steps``
            also an endless iterator. One a step, again from the start for more steps. Under
            torch.distributed each process gives its own; gradients are averaged.
        start: Default: ``hadamard(model)``, with R3 if ``kv_bits`` is given.
        activation_bits, kv_bits, weight_bits, weight_group, symmetric: As in :func:`quantized`.
        loss: "noise", place by place, so that a step is one forward pass; "kl" to the model in full
            precision, which may go on from there with ``start``; or "ce", the cross-entropy of the
            next token.
        top_k: Compare only so many largest logits of the model in full precision. Default: all.
        optimizer: Called with the list of rotations, R1 first, tagged parameters in float32; for
            another method, as ``lambda p: so.StiefelSGD(p, lr=0.1)``. Default: StiefelAdam with
            ``radius=1.0, nesterov=False``, the step as printed.
        steps: Default: one for each batch, and at least 200.
        lr: Of the default optimizer, in radians: the root mean square of the angles by which a
            rotation of any size turns in the first step, ``lr / sqrt(n)`` for each entry. Default:
            0.1 for "noise", 0.03 for the others. All learning rates fall to 0 along a cosine.
        gradient_checkpointing: Whether layers keep only their inputs for the backward pass.
        progress: Whether tqdm shows loss and orthonormality.
        checkpoint: A file that is written every ten steps and at the end, and read if it is there:
            a training that is stopped goes on from it, bit for bit.

    Returns: The rotations of the last step or, if these are no better on the first four batches,
        the start; ``log`` has the steps.
    Raises:
        ValueError: for a model that is not prepared, options out of range, no batches, endless ones
            without ``steps``, a mask that selects no token, and a checkpoint of another model,
            other options, another start or other batches.
        TypeError: for batches that are no token ids, naming the first, and for other wrong types.
    Warns: for activations of 4 bits or less without R4.
    Note: A step is two forward passes and one backward pass; with "noise" one forward pass. Memory
        beside that of the activations: the rotations in float32, and the optimizer's state.
    Reference: Liu et al., SpinQuant (ICLR 2025), for rotations that are learned; the gradient here
        also passes the step of the grid, see :func:`stiefel_opt.rotations.quantized`.
    """
    decoder = usable_decoder(model)
    _check_options(loss, top_k, optimizer, steps, lr)
    check_flags(gradient_checkpointing=gradient_checkpointing, progress=progress)
    data = _token_batches(batches, steps)
    total = max(STEPS, len(data)) if steps is None else steps
    bits = {"activation_bits": activation_bits, "kv_bits": kv_bits, "weight_bits": weight_bits}
    options: dict[str, Any] = {**bits, "weight_group": weight_group, "symmetric": symmetric}
    quantizers_of(decoder, "start", None, **options)  # its checks
    if all(given is None for given in bits.values()):
        raise ValueError(fail("activation_bits", "be given, or kv_bits or weight_bits", "None"))
    if start is None:
        start = hadamard(decoder.model, online=None if kv_bits is None else ("R3", "R4"))
    quantizers_of(decoder, "start", start, **options)
    warn_without_r4(decoder, start, activation_bits)
    framed = decoder.description.norm == "layer" and start.residual is not None
    rotations = _parameters(start, decoder.device, framed)
    moving = _of_matrices(rotations, start, framed)
    quantizers = Quantizers(decoder, moving, **options, recompute=gradient_checkpointing)
    method = _made(optimizer, rotations, ANGLES[loss] if lr is None else lr)
    options |= {"loss": loss, "top_k": top_k, "steps": total, "online": list(start.online)}
    options |= {"lr": lr, **_options_of(method)}
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        options |= _digests(decoder.model, start, data)
    training = _Training(rotations, method, path, options)
    frame = rotations[0] if framed else None
    objective = _Objective(decoder, quantizers, loss, top_k, frame)
    bars = ProgressBar(total, progress, silent=_rank() != 0)
    with _frozen(decoder.model), quantizers.installed(), bars as bar:
        matrices = training.run(objective, data, bar)
    return _of_matrices(matrices, start, framed, training.log)


def _made(factory: OptimizerFactory | None, rotations: list[nn.Parameter], lr: float) -> Optimizer:
    """Default: StiefelAdam as printed; of lr for entries an n x n matrix turns by sqrt(n) lr."""
    if factory is not None:
        remedy = "for instance `lambda p: so.StiefelSGD(p, lr=0.1)`"
        optimizer = factory(rotations)
        check_type("optimizer", optimizer, Optimizer, "return a torch.optim.Optimizer", remedy)
        return optimizer
    groups = [
        {"params": [r for r in rotations if len(r) == size], "lr": lr / math.sqrt(size)}
        for size in sorted({len(rotation) for rotation in rotations})
    ]
    return StiefelAdam(groups, radius=1.0, nesterov=False)


def _parameters(start: Rotations, device: torch.device, framed: bool) -> list[nn.Parameter]:
    """Return trainable copies of the rotations, R1 first; of it only what LayerNorms leave free."""
    matrices = start.matrices()
    if framed:
        matrices[0] = inside_ones(matrices[0])
    return [
        ManifoldParameter(matrix.detach().to(device, torch.float32, copy=True).contiguous())
        for matrix in matrices
    ]


def _of_matrices(
    matrices: list[Any], start: Rotations, framed: bool, log: Sequence[Any] = ()
) -> Rotations:
    """Return ``matrices`` in the places that those of ``start`` have."""
    if start.residual is None:
        return Rotations(None, matrices, start.online, log)
    residual = around_ones(matrices[0].detach()) if framed else matrices[0]
    return Rotations(residual, matrices[1:], start.online, log)


@torch.no_grad()
def _corrected_error(rotation: nn.Parameter) -> float:
    """Remove rounding from R where it has accumulated, and return the largest entry of R'R - I."""
    error = float(gram_error(rotation.detach().double()))
    if DRIFT < error < 1:
        rotation.copy_(polished(rotation))
        error = float(gram_error(rotation.detach().double()))
    return error


# ---- the loss ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Objective:
    """Loss of one batch of token ids; ``mean`` is that of several, without gradient."""

    decoder: Decoder
    quantizers: Quantizers
    loss: str
    top_k: int | None
    frame: Tensor | None = None  # what is trained of R1, where LayerNorms bind it

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        if self.frame is not None:
            self.quantizers.residual = around_ones(self.frame)
        device = self.decoder.device
        batch = {name: value.to(device) for name, value in batch.items()}
        mask = batch.get("attention_mask")
        if self.loss == "noise":
            return self._noise(batch)
        if self.loss == "ce":
            pairs = None if mask is None else mask[:, 1:] * mask[:, :-1]
            following = _counted(batch["input_ids"][:, 1:], pairs)
            return functional.cross_entropy(_counted(self._logits(batch)[:, :-1], pairs), following)
        with torch.no_grad(), self.quantizers.disabled():
            target = _counted(self._logits(batch), mask)
            index = None
            if self.top_k is not None and self.top_k < target.size(-1):
                target, index = target.topk(self.top_k, dim=-1)
            target = target.log_softmax(-1)
        logits = _counted(self._logits(batch), mask)
        if index is not None:
            logits = logits.gather(-1, index)
        output = logits.log_softmax(-1)
        return functional.kl_div(output, target, reduction="batchmean", log_target=True)

    def _noise(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean noise of the quantisers; each adds its gradient during the forward pass."""
        noises: list[Tensor] = []
        needs_grad = torch.is_grad_enabled()

        def measure(noise: Tensor) -> None:
            if needs_grad:
                noise.backward()  # type: ignore[no-untyped-call]
            noises.append(noise.detach())

        mask = batch.get("attention_mask")
        framed = self.quantizers.residual
        if self.frame is not None and framed is not None:
            self.quantizers.residual = framed.detach().requires_grad_()
        self.quantizers.measure = measure
        self.quantizers.counted = None if mask is None else mask.bool()
        try:
            with torch.no_grad():
                self.decoder.model(**batch, use_cache=False, logits_to_keep=1)
        finally:
            self.quantizers.measure = self.quantizers.counted = None
        for rotation in (self.quantizers.residual, *self.quantizers.heads):
            if needs_grad and rotation is not None and rotation.grad is not None:
                rotation.grad /= len(noises)
        if self.frame is not None and framed is not None and needs_grad:
            framed.backward(self.quantizers.residual.grad)  # type: ignore[no-untyped-call, union-attr]
        return torch.stack(noises).mean()

    @torch.no_grad()
    def mean(self, data: list[dict[str, Tensor]]) -> float:
        return _average([torch.stack([self(batch) for batch in data]).mean()])

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.decoder.model(**batch, use_cache=False).logits
        return logits.float()


def _counted(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return one row for each token that the mask selects."""
    return values.flatten(0, 1) if mask is None else values[mask.bool()]


# ---- processes -----------------------------------------------------------------------------------


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if _many() else 0


@torch.no_grad()
def _average(tensors: list[Tensor | None]) -> float:
    """Average tensors over all processes in place; return the first, a number."""
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor in present if _many() else ():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return float(present[0])


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Context: the model's parameters get no gradients, and dropout is off."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    model.requires_grad_(False)
    model.eval()
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


# ---- a training that can be stopped --------------------------------------------------------------


@dataclasses.dataclass
class _Training:
    """Everything a checkpoint holds, and the loop over steps."""

    rotations: list[nn.Parameter]
    optimizer: Optimizer
    path: Path | None
    options: dict[str, Any]
    log: list[dict[str, float]] = dataclasses.field(default_factory=list)
    initial: float | None = None  # loss at the initial rotations

    def __post_init__(self) -> None:
        self.schedule = CosineAnnealingLR(self.optimizer, max(1, self.options["steps"]))

    def run(
        self, objective: _Objective, data: list[dict[str, Tensor]], bar: ProgressBar
    ) -> list[Tensor]:
        """Take the remaining steps; return the last rotations, or the initial ones if better."""
        rotations = self.rotations
        for rotation in rotations if _many() else ():
            dist.broadcast(rotation.data, 0)
        initial = [rotation.detach().clone() for rotation in rotations]
        self.resume()
        if self.initial is None:
            self.initial = objective.mean(data[:WATCHED])
        bar.update(len(self.log))
        for step in range(len(self.log), self.options["steps"]):
            began = time.perf_counter()
            self.optimizer.zero_grad()
            value = objective(data[step % len(data)])
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            loss = _average([value.detach(), *(rotation.grad for rotation in rotations)])
            self.optimizer.step()
            self.schedule.step()
            error = max(_corrected_error(rotation) for rotation in rotations)
            seconds = time.perf_counter() - began
            entry = {"step": step, "loss": loss, "orthonormality": error, "seconds": seconds}
            self.log.append(entry)
            is_due = (step + 1) % EVERY == 0 or step + 1 == self.options["steps"]
            if self.path is not None and is_due:
                self._save(self.path)
            bar.update(note=f"loss {loss:.4g}, |R'R - I| {error:.0e}")
        is_better = objective.mean(data[:WATCHED]) <= self.initial  # False for NaN
        return [rotation.detach() for rotation in rotations] if is_better else initial

    def _save(self, path: Path) -> None:
        if _rank() != 0:
            self.optimizer.state_dict()  # settles the state, here as there
            return
        content = {
            "options": self.options,
            "rotations": [rotation.detach() for rotation in self.rotations],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "log": self.log,
            "before": self.initial,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        torch.save(content, unfinished)
        os.replace(unfinished, path)

    def resume(self) -> None:
        """Go on from the file, if there is one."""
        if self.path is None or not self.path.exists():
            return
        content = torch.load(self.path, map_location="cpu", weights_only=True)
        for name, value in self.options.items():
            given = content["options"].get(name)
            if given != value:
                remedy = f"pass {name}={given!r}, or another path"
                wanted, other = f"be of a training with {name}={value!r}", f"one with {given!r}"
                if name in ("start", "batches", "model"):
                    wanted, other = f"be of a training with the same {name}", "one with another"
                    remedy = f"pass the {name} that it was begun with, or another path"
                raise ValueError(fail("checkpoint", wanted, other, remedy))
        with torch.no_grad():
            for rotation, value in zip(self.rotations, content["rotations"], strict=True):
                rotation.copy_(value)
        self.optimizer.load_state_dict(content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        self.log, self.initial = content["log"], content["before"]


def _options_of(optimizer: Optimizer) -> dict[str, str]:
    """Return class and options of an optimizer before its first step."""
    options = {
        f"{name} of group {number}": str(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
    return {"optimizer": type(optimizer).__name__, **options}


def _digests(model: nn.Module, start: Rotations, data: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Return hashes of everything that a training goes on with."""
    return {
        "start": _digest(start.matrices()),
        "batches": _of_all(_digest(each for batch in data for each in batch.values())),
        "model": _of_all(_digest(model.state_dict().values())),
    }


def _digest(tensors: Iterable[Tensor]) -> str:
    """Return a short hash of the tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = local_part(tensor).detach().cpu().contiguous()
        digest.update(f"{values.shape}{values.dtype}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _of_all(mine: str) -> list[str]:
    """Return the hashes of every process."""
    if not _many():
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


# ---- arguments -----------------------------------------------------------------------------------


def _token_batches(batches: object, steps: int | None) -> list[dict[str, Tensor]]:
    """Return at most ``steps`` batches as dicts of token ids and masks, all checked."""
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        wanted, kind = "be an iterable of batches of token ids", type(batches).__name__
        raise TypeError(fail("batches", wanted, kind, "put it into a list"))
    data: list[dict[str, Tensor]] = []
    for number, batch in enumerate(itertools.islice(batches, steps)):
        if number == MOST and steps is None and not operator.length_hint(batches):
            given, remedy = f"more than {MOST} from an iterator", "pass steps, or a list"
            raise ValueError(fail("batches", "come to an end", given, remedy))
        content = {"input_ids": batch} if isinstance(batch, Tensor) else batch
        ids = content.get("input_ids") if isinstance(content, Mapping) else None
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            wanted = "be token ids (batch, tokens), or a dict with input_ids"
            got = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else ""
            remedy = "tokenize with return_tensors='pt'"
            raise TypeError(fail(f"batches[{number}]", wanted, got or type(batch).__name__, remedy))
        own, mask = {"input_ids": ids.long()}, content.get("attention_mask")
        if mask is not None:
            _check_mask(f"batches[{number}]['attention_mask']", mask, ids)
            own["attention_mask"] = mask
        data.append(own)
    if not data:
        raise ValueError(fail("batches", "hold at least one batch", "none"))
    return data


def _check_mask(name: str, mask: object, ids: Tensor) -> None:
    """Raise unless ``mask`` selects some of the tokens."""
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        given = mask if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(fail(name, f"be a tensor {tuple(ids.shape)}, as input_ids", given))
    if not bool(mask.any()):
        raise ValueError(fail(name, "select at least one token", "zeros", "leave the batch out"))


def _check_options(
    loss: object, top_k: object, optimizer: object, steps: object, lr: object
) -> None:
    check_choice("loss", loss, ANGLES)
    check_counts(or_none=True, top_k=top_k, steps=steps)
    if top_k is not None and loss != "kl":
        raise ValueError(fail("top_k", "be None for losses but kl", top_k))
    if optimizer is not None and not callable(optimizer):
        wanted = "be a function from the list of rotations to an optimizer"
        raise TypeError(fail("optimizer", wanted, type(optimizer).__name__, "wrap it in a lambda"))
    if lr is not None:
        check_range("lr", lr, 0.0, open_low=True)
        if optimizer is not None:
            remedy = "set its learning rate in the function"
            raise ValueError(fail("lr", "be None where optimizer is given", lr, remedy))
