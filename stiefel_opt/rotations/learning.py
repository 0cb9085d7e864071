"""Train the rotations of a frozen decoder against the noise of its own quantisation."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.optimizer import Optimizer

from stiefel_opt._checks import check_choice, check_flag, check_range, fail
from stiefel_opt._optional import ProgressBar
from stiefel_opt.geometry import gram_error
from stiefel_opt.optim import StiefelAdam
from stiefel_opt.parameter import ManifoldParameter
from stiefel_opt.rotations.decoder import Decoder, read_decoder
from stiefel_opt.rotations.quantizers import Quantizers, check_prepared, quantizers_of
from stiefel_opt.rotations.result import Rotations, polished
from stiefel_opt.rotations.starts import hadamard

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

STEPS = 200  # at least, where `steps` is not given
ANGLES = {"noise": 0.1, "kl": 0.03, "ce": 0.03}  # lr, in radians; see `learn`
WATCHED = 4  # batches on which the end is compared with the start
DRIFT = 5e-7  # of R'R, in float32, from which on rounding is taken out of a rotation
EVERY = 10  # steps from one checkpoint to the next


def learn(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    start: Rotations | None = None,
    activation_bits: int | None = 4,
    kv_bits: int | None = None,
    weight_bits: int | None = None,
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
        model: A model that :func:`prepare_` has prepared, in any floating-point dtype, on any
            device; bare, in ``DistributedDataParallel``, or after ``fully_shard``.
        batches: Token ids ``(batch, tokens)``, or dicts with ``input_ids`` and perhaps
            ``attention_mask``: a list, a data loader. One a step, again from the start for more
            steps. Under torch.distributed each process gives its own; gradients are averaged.
        start: Default: ``hadamard(model)``, with R3 if ``kv_bits`` is given.
        activation_bits, kv_bits, weight_bits, symmetric: As in :func:`quantized`.
        loss: "noise", place by place, so that a step is one forward pass; "kl" to the model in full
            precision, which may go on from there with ``start``; or "ce", the cross-entropy of the
            next token.
        top_k: Compare only so many largest logits of the model in full precision. Default: all.
        optimizer: Called with the list of rotations, R1 first, tagged parameters in float32; for
            another method, as ``lambda p: so.StiefelSGD(p, lr=0.1)``. Default: StiefelAdam.
        steps: Default: one for each batch, and at least 200.
        lr: Of the default optimizer, in radians: the root mean square of the angles by which a
            rotation of any size turns in the first step, ``lr / sqrt(n)`` for each entry. Default:
            0.1 for "noise", 0.03 for the others. All rates fall to 0 along a cosine.
        gradient_checkpointing: Whether layers keep only their inputs for the backward pass.
        progress: Whether tqdm shows loss and orthonormality.
        checkpoint: A file that is written every ten steps and at the end, and read if it is there:
            a training that is stopped goes on from it, bit for bit.

    Returns: The rotations of the last step or, if these are no better on the first four batches,
        the start; ``log`` has the steps.
    Raises:
        ValueError: for a model that is not prepared, options out of range, no batches, and a
            checkpoint of other options, another start or other batches.
        TypeError: for batches that are no token ids, naming the first, and for other wrong types.
    Note: A step is two forward passes and one backward pass; with "noise" one forward pass. Memory
        beside that of the activations: the rotations in float32, and the optimizer's state.
    Reference: Liu et al., SpinQuant (ICLR 2025), for rotations that are learned; the gradient here
        also passes the step of the grid, see :func:`stiefel_opt.rotations.quantized`.
    """
    decoder = read_decoder(model)
    check_prepared(decoder)
    _check_options(loss, top_k, optimizer, steps, lr)
    check_flag("gradient_checkpointing", gradient_checkpointing)
    check_flag("progress", progress)
    data = _token_batches(batches, steps)
    total = max(STEPS, len(data)) if steps is None else steps
    bits = {"activation_bits": activation_bits, "kv_bits": kv_bits, "weight_bits": weight_bits}
    options: dict[str, Any] = {**bits, "symmetric": symmetric}
    quantizers_of(decoder, "start", None, **options)  # its checks
    if all(given is None for given in bits.values()):
        raise ValueError(fail("activation_bits", "be given, or kv_bits or weight_bits", "None"))
    if start is None:
        start = hadamard(decoder.model, online=("R4",) if kv_bits is None else ("R3", "R4"))
    quantizers_of(decoder, "start", start, **options)
    device = decoder.embedding.weight.device
    rotations = [_parameter(matrix, device) for matrix in (start.residual, *start.heads)]
    moving = Rotations(rotations[0], rotations[1:], start.online)
    quantizers = Quantizers(decoder, moving, **options, recompute=gradient_checkpointing)
    method = _default(rotations, ANGLES[loss] if lr is None else lr) if optimizer is None else None
    method = method or optimizer(rotations)  # type: ignore[misc]
    schedule = CosineAnnealingLR(method, max(1, total))
    objective = _Objective(decoder, quantizers, loss, top_k)
    asked = {**options, "loss": loss, "top_k": top_k, "steps": total, "online": list(start.online)}
    asked |= {"lr": lr, **_options_of(method)}
    asked |= {"start": _digest([start.residual, *start.heads]), "batches": _digest_of_all(data)}
    path = None if checkpoint is None else Path(checkpoint)
    training = _Training(rotations, method, schedule, path, asked)
    remedy, silent = "run: pip install tqdm, or pass progress=False", _rank() != 0
    bars = ProgressBar(total, progress, remedy, silent=silent)
    with _frozen(decoder.model), quantizers.installed(), bars as bar:
        _share(rotations)
        begun = [rotation.detach().clone() for rotation in rotations]
        training.resume()
        watched = data[:WATCHED]
        if training.before is None:
            training.before = objective.mean(watched)
        bar.update(len(training.log))
        for step in range(len(training.log), total):
            began = time.perf_counter()
            method.zero_grad()
            value = objective(data[step % len(data)])
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            reached = _average([value.detach(), *(rotation.grad for rotation in rotations)])
            method.step()
            schedule.step()
            error = max(_kept(rotation) for rotation in rotations)
            training.note(step, reached, error, time.perf_counter() - began)
            bar.update(note=f"loss {reached:.4g}, |R'R - I| {error:.0e}")
        after = objective.mean(watched)
    better = after <= training.before  # not where it is NaN
    found = [rotation.detach() for rotation in rotations] if better else begun
    return Rotations(found[0], found[1:], start.online, training.log)


def _default(rotations: list[nn.Parameter], angle: float) -> Optimizer:
    """StiefelAdam; its entries move by lr, so an n x n matrix turns by about sqrt(n) times that."""
    groups = [
        {"params": [r for r in rotations if len(r) == size], "lr": angle / math.sqrt(size)}
        for size in sorted({len(rotation) for rotation in rotations})
    ]
    return StiefelAdam(groups, radius=1.0)


def _parameter(matrix: Tensor, device: torch.device) -> nn.Parameter:
    return ManifoldParameter(matrix.detach().to(device, torch.float32, copy=True).contiguous())


@torch.no_grad()
def _kept(rotation: nn.Parameter) -> float:
    """Return the error of R'R, after rounding is taken out where much has gathered."""
    error = float(gram_error(rotation.detach().double()))
    if DRIFT < error < 1:
        rotation.copy_(polished(rotation))
        error = float(gram_error(rotation.detach().double()))
    return error


# ---- the loss ------------------------------------------------------------------------------------


class _Objective:
    """Loss of one batch of token ids; the mean over some without gradient."""

    def __init__(
        self, decoder: Decoder, quantizers: Quantizers, loss: str, top_k: int | None
    ) -> None:
        self.model, self.quantizers, self.loss, self.top_k = decoder.model, quantizers, loss, top_k
        self.device = decoder.embedding.weight.device

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        batch = {name: value.to(self.device) for name, value in batch.items()}
        mask = batch.get("attention_mask")
        if self.loss == "noise":
            return self._noise(batch)
        if self.loss == "ce":
            pairs = None if mask is None else mask[:, 1:] * mask[:, :-1]
            following = _counted(batch["input_ids"][:, 1:], pairs)
            return functional.cross_entropy(_counted(self._logits(batch)[:, :-1], pairs), following)
        with torch.no_grad(), self.quantizers.disabled():
            wanted = _counted(self._logits(batch), mask)
            index = None
            if self.top_k is not None and self.top_k < wanted.size(-1):
                wanted, index = wanted.topk(self.top_k, dim=-1)
            wanted = wanted.log_softmax(-1)
        logits = _counted(self._logits(batch), mask)
        if index is not None:
            logits = logits.gather(-1, index)
        found = logits.log_softmax(-1)
        return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)

    def _noise(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the places; each adds to the gradients as it is passed, and is forgotten."""
        found: list[Tensor] = []
        wanted = torch.is_grad_enabled()

        def measure(noise: Tensor) -> None:
            if wanted:
                noise.backward()  # type: ignore[no-untyped-call]
            found.append(noise.detach())

        self.quantizers.measure = measure
        try:
            with torch.no_grad():
                self.model(**batch, use_cache=False, logits_to_keep=1)
        finally:
            self.quantizers.measure = None
        for rotation in (self.quantizers.residual, *self.quantizers.heads):
            if wanted and rotation is not None and rotation.grad is not None:
                rotation.grad /= len(found)
        return torch.stack(found).mean()

    @torch.no_grad()
    def mean(self, data: list[dict[str, Tensor]]) -> float:
        return _average([torch.stack([self(batch) for batch in data]).mean()])

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch, use_cache=False).logits
        return logits.float()


def _counted(values: Tensor, mask: Tensor | None) -> Tensor:
    """One row for each token that the mask keeps."""
    return values.flatten(0, 1) if mask is None else values[mask.bool()]


# ---- processes -----------------------------------------------------------------------------------


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if _many() else 0


@torch.no_grad()
def _average(tensors: list[Tensor | None]) -> float:
    """Average tensors over all processes in place, as one message; return the first, a number."""
    present = [tensor for tensor in tensors if tensor is not None]
    if _many():
        joined = torch.cat([tensor.flatten().float() for tensor in present])
        dist.all_reduce(joined)
        joined /= dist.get_world_size()
        pieces = torch.split(joined, [tensor.numel() for tensor in present])
        for tensor, piece in zip(present, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
    return float(present[0])


@torch.no_grad()
def _share(rotations: list[nn.Parameter]) -> None:
    """All processes begin where the first does."""
    if _many():
        for rotation in rotations:
            dist.broadcast(rotation.data, 0)


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for the model's own parameters, and no dropout, meanwhile."""
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
    """Everything a checkpoint holds."""

    rotations: list[nn.Parameter]
    optimizer: Optimizer
    schedule: CosineAnnealingLR
    path: Path | None
    options: dict[str, Any]
    log: list[dict[str, float]] = dataclasses.field(default_factory=list)
    before: float | None = None  # the loss at the start

    def note(self, step: int, loss: float, error: float, seconds: float) -> None:
        entry = {"step": step, "loss": loss, "orthonormality": error, "seconds": seconds}
        self.log.append(entry)
        count = len(self.log)
        if self.path is not None and (count % EVERY == 0 or count == self.options["steps"]):
            self._save(self.path)

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
            "before": self.before,
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
                wanted, found = f"be of a training with {name}={value!r}", f"one with {given!r}"
                if name in ("start", "batches"):
                    wanted, found = f"be of a training with the same {name}", "one with others"
                    remedy = f"pass the {name} that it was begun with, or another path"
                raise ValueError(fail("checkpoint", wanted, found, remedy))
        with torch.no_grad():
            for rotation, value in zip(self.rotations, content["rotations"], strict=True):
                rotation.copy_(value)
        self.optimizer.load_state_dict(content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        self.log, self.before = content["log"], content["before"]


def _options_of(optimizer: Optimizer) -> dict[str, str]:
    """Class and options of an optimizer, as they are before its first step."""
    found = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: str(value) for name, value in group.items() if name != "params"}
        found |= {f"{name} of group {number}": value for name, value in options.items()}
    return found


def _digest(tensors: Iterable[Tensor]) -> str:
    """A few letters that differ where one of the tensors does."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{values.shape}{values.dtype}".encode())
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _digest_of_all(data: list[dict[str, Tensor]]) -> list[str]:
    """Of the batches of each process."""
    mine = _digest(tensor for batch in data for tensor in batch.values())
    if not _many():
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


# ---- what is given -------------------------------------------------------------------------------


def _token_batches(batches: object, steps: int | None) -> list[dict[str, Tensor]]:
    """Check and keep the token ids, as many batches as there are steps."""
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        wanted, kind = "be an iterable of batches of token ids", type(batches).__name__
        raise TypeError(fail("batches", wanted, kind, "put it into a list"))
    found = []
    for number, batch in enumerate(itertools.islice(batches, steps)):
        content = {"input_ids": batch} if isinstance(batch, Tensor) else batch
        ids = content.get("input_ids") if isinstance(content, Mapping) else None
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            wanted = "be token ids (batch, tokens), or a dict with input_ids"
            got = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else ""
            remedy = "tokenize with return_tensors='pt'"
            raise TypeError(fail(f"batches[{number}]", wanted, got or type(batch).__name__, remedy))
        mask = content.get("attention_mask")
        kept = {"input_ids": ids.long()}
        found.append(kept if mask is None else {**kept, "attention_mask": mask})
    if not found:
        raise ValueError(fail("batches", "hold at least one batch", "none"))
    return found


def _check_options(
    loss: object, top_k: object, optimizer: object, steps: object, lr: object
) -> None:
    check_choice("loss", loss, ANGLES)
    for name, value in (("top_k", top_k), ("steps", steps)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(fail(name, "be an integer of at least 1, or None", repr(value)))
    if top_k is not None and loss != "kl":
        raise ValueError(fail("top_k", "be None for losses but kl", top_k))
    if optimizer is not None and not callable(optimizer):
        wanted = "be a function from the list of rotations to an optimizer"
        raise TypeError(fail("optimizer", wanted, type(optimizer).__name__, "wrap it in a lambda"))
    if lr is not None:
        check_range("lr", lr, 0.0, open_low=True)
        if optimizer is not None:
            remedy = "set its rate in the function"
            raise ValueError(fail("lr", "be None where optimizer is given", lr, remedy))
