"""Adapters of peft with exactly orthogonal factors, and the way back to plain peft."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from typing_extensions import override

from stiefel_opt.errors import check_dtype, check_module, check_range, fail
from stiefel_opt.numerics import (
    has_values,
    is_sharded,
    polar_factor,
    positive_qr,
    widened,
)
from stiefel_opt.tags import Stiefel, constrain, manifold_of, release
from stiefel_opt.tools.migration import from_torch_orthogonal
from stiefel_opt.tools.report import orthonormality_error, table

Line = tuple[str, str, str, str]  # parameter, what it is, its matrices, what was done
Part = tuple[str | None, Callable[[], list[Line]]]  # an adapter, and what changes it and reports
FROM_TORCH: Final = "_stiefel_from_torch"  # {weight: (map, trivialization)}, on the owner
PENALTY: Final = "_stiefel_penalty"  # the weight of AdaLoRA's penalty, on its config
SOUGHT: Final = (
    "blocks of OFT, P and Q of AdaLoRA, or a weight of torch.nn.utils.parametrizations.orthogonal, "
    "as LoReFT has"
)


@dataclass(frozen=True, repr=False)
class AdapterReport:
    """What :func:`constrain_adapters` or :func:`export_adapters` did; printing it shows a table.

    Attributes:
        action: ``"constrained"`` or ``"exported"``.
        lines: ``(parameter, what it is, its matrices, what was done)`` for each parameter.
    """

    action: str
    lines: tuple[Line, ...]

    @override
    def __repr__(self) -> str:
        head = f"parameters of adapters {self.action}: {len(self.lines)}\n"
        return head + table([("parameter", "part", "matrices", "what was done"), *self.lines])


@torch.no_grad()
def constrain_adapters(
    model: nn.Module, adapter: str | None = None, *, tolerance: float = 1e-4
) -> AdapterReport:
    r"""Keep the orthogonal factors of an adapted model exactly orthogonal.

    Found are:

    - blocks of OFT: the parameter becomes the rotation R itself, (blocks, b, b), in place of the
      numbers from which peft computes it by a Neumann series or a Cayley transform. R reaches every
      angle;
    - P and Q of AdaLoRA: tagged, and the weight of peft's penalty becomes 0. A trained update is
      factored anew, with the same :math:`P \Lambda Q`;
    - weights of ``torch.nn.utils.parametrizations.orthogonal``, as the rotation of LoReFT: tagged
      as by :func:`from_torch_orthogonal`.

    The function of the model stays the same. peft's parameter objects stay, too; their shape
    changes for OFT, so that the graph of an earlier forward pass must be gone. Train them by an
    optimizer of this package, built anew if it has taken a step.
    Several adapters, dropout, merging, saving and resuming work as before. A saved OFT adapter
    loads in models that are constrained alike, until :func:`export_adapters` restores peft's
    numbers.

    Args:
        model: A ``PeftModel``, a model of transformers with adapters, or interventions of pyreft;
            changed in place.
        adapter: The name of one adapter of peft. Default: all, and the weights of torch.
        tolerance: By how much a block of OFT may change, in the spectral norm. peft's series of a
            trained block is no rotation. Default: 1e-4.

    Returns: What was done, by parameter.
    Raises:
        ValueError: if there is no such part or adapter, all are constrained already, an adapter is
            merged, a block changes by more than ``tolerance``, OFT has ``coft=True`` or adapts a
            convolution whose kernel has more than one pixel; for a rank above a width of its layer,
            and values on the meta device. Nothing is changed then.
        TypeError: for dtypes that :func:`constrain` refuses, and sharded parameters.

    Note: For each block of OFT one singular value decomposition, for each pair P, Q two QR
        decompositions and one of r x r, once.
    Reference: Qiu et al. (2023), orthogonal fine-tuning; Zhang et al., AdaLoRA (2023), equations 3
        and 4; Wu et al., ReFT (2024).
    """
    check_module("model", model)
    check_range("tolerance", tolerance, 0.0)
    parts: list[Part] = []
    constrained: list[str] = []
    for path, layer, key in _layers(model, adapter):
        if _is_constrained(layer, key):
            constrained.append(path)
        elif isinstance(layer, _peft_parts().OFTLayer):
            parts.append(_rotation_to_constrain(path, layer, key, tolerance))
        elif isinstance(layer, _peft_parts().AdaLoraLayer):
            parts += _triplets_to_constrain(path, layer, key)
    with_torch = adapter is None and any(_from_torch(model))
    if not parts and not with_torch:
        given = f"a {_kind(model)}"
        if constrained:
            remedy = "build the optimizer; so.export_adapters(model) goes back to peft"
            given += f" whose {constrained[0]} is constrained already"
            raise ValueError(
                fail("model", "have factors that are not constrained yet", given, remedy)
            )
        remedy = "for LoRA on the manifold make the adapter with so.StellaConfig"
        raise ValueError(fail("model", f"have {SOUGHT}", given, remedy))
    lines = _convert_torch(model) if with_torch else []
    for _, change in parts:
        lines += change()
    for configs in _config_dicts(model):
        for name in configs.keys() & dict(parts).keys():
            if (config := configs[name]).peft_type == "ADALORA":
                config.__dict__[PENALTY] = config.orth_reg_weight
                config.orth_reg_weight = 0.0
    return AdapterReport("constrained", tuple(lines))


@torch.no_grad()
def export_adapters(
    model: nn.Module, adapter: str | None = None, *, tolerance: float = 1e-3
) -> AdapterReport:
    r"""Undo :func:`constrain_adapters`: numbers and settings as plain peft has them.

    Blocks of OFT become :math:`(I - R)(I + R)^{-1}` with ``use_cayley_neumann=False``, which is
    exact; P and Q of AdaLoRA keep their values and get the penalty back; a weight from torch's
    parametrization gets the same again; StelLA becomes LoRA of the same rank, A = S V' and B = U.
    Then ``model.save_pretrained(folder)`` writes what peft loads where this package is not
    installed.

    Args:
        model: The model; changed in place. Keep a copy, or constrain it again, to train on.
        adapter: The name of one adapter of peft. Default: all, and the weights of torch.
        tolerance: By how much a block of OFT may change, in the spectral norm, beside the rounding
            of its dtype. Default: 1e-3.

    Returns: What was done, by parameter.
    Raises:
        ValueError: if nothing is constrained, an adapter is merged, a block is off the manifold by
            more than ``tolerance``, turns by pi, of which peft's numbers are infinite, or is a
            reflection. Nothing is changed then.
        TypeError: if ``model`` is not a module.

    Note: Optimizers of the model have to be built anew, and graphs be gone. One linear system for
        each block of OFT.
    """
    check_module("model", model)
    check_range("tolerance", tolerance, 0.0)
    parts = [
        _to_export(path, layer, key, tolerance)
        for path, layer, key in _layers(model, adapter)
        if _is_constrained(layer, key)
    ]
    if adapter is None:
        parts += [
            _to_torch(path, owner, leaf, *known)
            for path, owner in model.named_modules()
            for leaf, known in owner.__dict__.get(FROM_TORCH, {}).items()
        ]
    if not parts:
        raise ValueError(_nothing_to_export(model, adapter))
    lines = [line for _, change in parts for line in change()]
    for configs in _config_dicts(model):
        for name in configs.keys() & dict(parts).keys():
            configs[name] = _plain_config(configs[name])
    return AdapterReport("exported", tuple(lines))


# ---- what is there -----------------------------------------------------------------------------


def _peft_parts() -> Any:
    return importlib.import_module("stiefel_opt.tools.peft_parts")


def _layers(model: nn.Module, adapter: str | None) -> Iterator[tuple[str, Any, str]]:
    """Yield (path, layer of peft, adapter) of every selected adapter."""
    known = sorted({name for configs in _config_dicts(model) for name in configs})
    if adapter not in (None, *known):
        remedy = "" if known else "make the model with peft.get_peft_model"
        listed = f"be one of {known}" if known else "be an adapter of peft"
        raise ValueError(fail("adapter", listed, repr(adapter), remedy))
    if sys.modules.get("peft") is None:  # nothing of the model can be of peft
        return
    parts = _peft_parts()
    for path, layer in model.named_modules():
        if not isinstance(layer, parts.TunerLayer):
            continue
        names = {name for held in _holders(layer) for name in getattr(layer, held).keys()}  # noqa: SIM118
        for name in sorted(names if adapter is None else names & {adapter}):
            if name not in known:
                remedy = "pass what get_peft_model returned: its config is written, too"
                given = f"a {type(model).__name__} without the config of {name!r}"
                raise ValueError(fail("model", "be the whole model", given, remedy))
            if name in layer.merged_adapters:
                remedy = "call model.unmerge_adapter() first"
                raise ValueError(fail(path, "not be merged", f"adapter {name!r} merged", remedy))
            yield path, layer, name


def _holders(layer: Any) -> tuple[str, ...]:
    """Return the attributes of a layer that hold its orthogonal factors, by adapter."""
    parts = _peft_parts()
    if isinstance(layer, parts.OFTLayer):
        return "oft_R", "oft_embedding_R"
    if isinstance(layer, parts.AdaLoraLayer):
        return ("lora_E",)
    return ("lora_A",) if hasattr(layer, "lora_A") else ()


def _rotation(layer: Any, key: str) -> tuple[str, Any]:
    """Return the name and the rotation of a layer under OFT."""
    held = "oft_R" if key in layer.oft_R else "oft_embedding_R"
    return f"{held}.{key}", getattr(layer, held)[key]


def _is_constrained(layer: Any, key: str) -> bool:
    parts = _peft_parts()
    if isinstance(layer, parts.OFTLayer):
        return isinstance(_rotation(layer, key)[1], parts.ExactRotation)
    if isinstance(layer, parts.AdaLoraLayer):
        return manifold_of(layer.lora_A[key]) is not None
    return isinstance(layer.lora_A[key], parts.InputFactor)


def _config_dicts(model: nn.Module) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for module in model.modules():
        configs = module.__dict__.get("peft_config")
        if isinstance(configs, dict) and id(configs) not in seen:
            seen.add(id(configs))
            yield configs


def _kind(model: nn.Module) -> str:
    """Return the class of a model and the types of its adapters, for a message."""
    types = [config.peft_type for configs in _config_dicts(model) for config in configs.values()]
    kinds = sorted({str(getattr(each, "value", each)) for each in types})
    return type(model).__name__ + (f" with {', '.join(kinds)}" if kinds else " without adapters")


def _from_torch(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield (path, owner, weight, map) of every weight of torch's own parametrization."""
    for path, owner in model.named_modules():
        if parametrize.is_parametrized(owner):
            for leaf, listed in owner.parametrizations.items():
                if isinstance(listed[0], parametrizations._Orthogonal):
                    yield path, owner, leaf, listed[0]


def _check(name: str, tensor: Tensor) -> None:
    check_dtype(name, tensor.dtype)
    if not has_values(tensor):
        raise ValueError(fail(name, "have values", "the meta device", "load the adapter first"))
    if is_sharded(tensor):
        remedy = "call it before fully_shard, or gather the parameters"
        raise TypeError(fail(name, "not be sharded", "a DTensor", remedy))
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(fail(name, "be finite", "infinities or NaN"))


def _matrices(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


# ---- constraining ------------------------------------------------------------------------------


def _rotation_to_constrain(path: str, layer: Any, key: str, tolerance: float) -> Part:
    called, rotation = _rotation(layer, key)
    name, old = f"{path}.{called}.weight", rotation.weight
    _check(name, old)
    if rotation.coft:
        remedy = "a bound on the angle is no constraint here: make the adapter with coft=False"
        raise ValueError(fail(f"{path}.{called}", "be without coft", "coft=True", remedy))
    size = rotation.kernel_size
    if max(size if isinstance(size, tuple) else (size,)) > 1:
        remedy = "peft adds overlapping patches up, so that merging changes the model; leave it out"
        raise ValueError(fail(path, "have a kernel of one pixel for OFT", size, remedy))
    options = rotation.use_cayley_neumann, rotation.num_cayley_neumann_terms
    given = rotation._cayley_batch(old.double(), rotation.block_size, *options)
    blocks = polar_factor(given)
    off = float(torch.linalg.matrix_norm(given - blocks, 2).amax())
    if off > tolerance:
        condition = f"be rotations up to {tolerance:g}"
        given_blocks = f"blocks that peft's series leaves off by {off:.1g}"
        remedy = "pass a larger tolerance: the function changes by as much; or another adapter="
        raise ValueError(fail(name, condition, given_blocks, remedy))

    def change() -> list[Line]:
        rotation.__class__ = _peft_parts().ExactRotation
        old.data, old.grad = blocks.to(old.dtype), None  # the object stays: optimizers hold it
        constrain(rotation, "weight", flatten=False)
        done = f"the rotation itself; peft's was off by {off:.1g}"
        return [(name, "OFT block", _matrices(blocks), done)]

    return key, change


def _triplets_to_constrain(path: str, layer: Any, key: str) -> list[Part]:
    left, middle, right = layer.lora_B[key], layer.lora_E[key], layer.lora_A[key]
    name = f"{path}.lora_A.{key}"
    for tensor in (left, middle, right):
        _check(name, tensor)
    rank, width = middle.size(0), min(left.size(0), right.size(1))
    if rank == 0:  # all of them were pruned
        return []
    if rank > width:
        condition = f"have a rank of at most {width}, the smaller width of its layer"
        raise ValueError(fail(name, condition, rank, "set init_r"))
    new = _factored(left.double(), middle.double()[:, 0], right.double())

    def change() -> list[Line]:
        for tensor, value in zip((left, middle[:, 0], right), new, strict=True):
            tensor.copy_(value)
        constrain(layer.lora_B, key, flatten=False)
        constrain(layer.lora_A, key, flatten=False)
        return _triplet_lines(path, layer, key, "orthonormal; peft's penalty is off")

    return [(key, change)]


def _triplet_lines(path: str, layer: Any, key: str, done: str) -> list[Line]:
    return [
        (f"{path}.lora_B.{key}", "AdaLoRA's P", _matrices(layer.lora_B[key]), done),
        (f"{path}.lora_A.{key}", "AdaLoRA's Q", _matrices(layer.lora_A[key]), done),
    ]


def _factored(left: Tensor, middle: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Factor :math:`P \Lambda Q` anew, with orthonormal P and Q.

    Triplets whose value is zero, initially or because AdaLoRA has pruned them, keep their places,
    with directions that complete the others.
    """
    live, idle = middle.nonzero()[:, 0], (middle == 0).nonzero()[:, 0]
    left_basis, left_part = torch.linalg.qr(left[:, live])
    right_basis, right_part = torch.linalg.qr(right[live].mT)
    u, values, v = torch.linalg.svd(left_part @ (middle[live, None] * right_part.mT))
    new_left, new_right, new_middle = left.clone(), right.clone(), middle.clone()
    new_left[:, live], new_middle[live] = left_basis @ u, values
    new_right[live] = v @ right_basis.mT
    order = torch.cat([live, idle])  # a Q factor with positive diagonal keeps the leading columns
    new_left[:, order] = positive_qr(new_left[:, order])
    new_right[order] = positive_qr(new_right[order].mT).mT
    return new_left, new_middle, new_right


def _convert_torch(model: nn.Module) -> list[Line]:
    """Tag the weights of torch's own parametrization; remember how each was computed."""
    weights = [
        (path, owner, leaf, (computed.orthogonal_map.name, hasattr(computed, "base")))
        for path, owner, leaf, computed in _from_torch(model)
    ]
    from_torch_orthogonal(model)
    lines = []
    for path, owner, leaf, known in weights:
        owner.__dict__.setdefault(FROM_TORCH, {})[leaf] = known
        name = f"{path}.{leaf}" if path else leaf
        done = "a parameter; torch's parametrization is gone"
        lines.append((name, "rotation", _matrices(owner.get_parameter(leaf)), done))
    return lines


# ---- exporting ---------------------------------------------------------------------------------


def _nothing_to_export(model: nn.Module, adapter: str | None) -> str:
    """Return the message for a model, or an adapter of it, without a constrained weight."""
    layers = list(_layers(model, None))
    constrained = sorted({key for _, layer, key in layers if _is_constrained(layer, key)})
    wanted = "have constrained adapters"
    given = f"a {_kind(model)}"
    if constrained:
        wanted = f"be constrained, as {constrained} {'is' if len(constrained) == 1 else 'are'}"
        return fail("adapter", wanted, repr(adapter), f"pass adapter={constrained[0]!r}")
    selected = [layer for _, layer, key in layers if adapter in (None, key)]
    parts = _peft_parts() if selected else None
    if parts and not any(isinstance(x, (parts.OFTLayer, parts.AdaLoraLayer)) for x in selected):
        given += ", whose numbers are peft's own"
        return fail("model", wanted, given, "save it by model.save_pretrained(folder)")
    return fail("model", wanted, given, "call so.constrain_adapters(model) first")


def _check_orthogonal(name: str, tensor: Tensor, tolerance: float) -> None:
    """Raise where an optimizer, or somebody's own line, has moved ``tensor`` off the manifold."""
    error = float(orthonormality_error(tensor, Stiefel()))
    if not error <= tolerance + 8 * torch.finfo(tensor.dtype).eps:
        given = f"one that is off the manifold by {error:.1e}"
        remedy = "call so.project_(model), and train with an optimizer that keeps the constraint"
        raise ValueError(fail(name, "be orthogonal", given, remedy))


def _to_export(path: str, layer: Any, key: str, tolerance: float) -> Part:
    if isinstance(layer, _peft_parts().OFTLayer):
        return _rotation_to_export(path, layer, key, tolerance)
    if isinstance(layer, _peft_parts().AdaLoraLayer):
        return _triplets_to_export(path, layer, key)
    return _stella_to_export(path, layer, key)


def _rotation_to_export(path: str, layer: Any, key: str, tolerance: float) -> Part:
    called, rotation = _rotation(layer, key)
    name, blocks = f"{path}.{called}.weight", rotation.weight
    _check(name, blocks)
    _check_orthogonal(name, blocks, tolerance)
    exact = blocks.detach().double()
    identity = torch.eye(blocks.size(-1), dtype=exact.dtype, device=exact.device)
    skew = torch.linalg.solve_ex(identity + exact, identity - exact, left=False)[0]
    numbers = skew[:, rotation.rows, rotation.cols].to(blocks.dtype)
    kind = _peft_parts().OFTRotation
    off = float("inf")
    if bool(torch.isfinite(numbers).all()):
        again = kind._cayley_batch(rotation, numbers, rotation.block_size, False)
        off = float(torch.linalg.matrix_norm(again.double() - exact, 2).amax())
    if not off <= tolerance + 8 * torch.finfo(blocks.dtype).eps:
        condition = "have a Cayley transform in its dtype, which peft's numbers are"
        given = f"a block that turns by an angle too near to pi, or reflects: {off:.1g} off"
        remedy = "pass a larger tolerance, or merge the constrained model"
        raise ValueError(fail(name, condition, given, remedy))

    def change() -> list[Line]:
        release(rotation, "weight")
        rotation.__class__, rotation.use_cayley_neumann = kind, False
        blocks.data, blocks.grad = numbers, None
        done = f"peft's numbers, exact Cayley; off by {off:.1g}"
        return [(name, "OFT block", _matrices(numbers), done)]

    return key, change


def _triplets_to_export(path: str, layer: Any, key: str) -> Part:
    def change() -> list[Line]:
        release(layer.lora_B, key)
        release(layer.lora_A, key)
        return _triplet_lines(path, layer, key, "plain again; peft's penalty is back")

    return key, change


def _stella_to_export(path: str, layer: Any, key: str) -> Part:
    factor, output = layer.lora_A[key], layer.lora_B[key]
    _check(f"{path}.lora_A.{key}", factor.core)

    def change() -> list[Line]:
        value = (widened(factor.core) @ widened(factor.basis)).to(factor.basis.dtype)
        plain = nn.Linear(value.size(1), value.size(0), bias=False, device="meta")
        plain.weight = nn.Parameter(value, requires_grad=factor.core.requires_grad)
        plain.train(factor.training)
        release(output, "weight")
        layer.lora_A[key] = plain
        return [
            (f"{path}.lora_A.{key}.weight", "LoRA's A", _matrices(value), "core times basis"),
            (f"{path}.lora_B.{key}.weight", "LoRA's B", _matrices(output.weight), "the basis"),
        ]

    return key, change


def _to_torch(path: str, owner: nn.Module, leaf: str, name: str, trivialized: bool) -> Part:
    called = f"{path}.{leaf}" if path else leaf
    value = owner.get_parameter(leaf).detach()
    _check_orthogonal(called, value, 1e-4)
    trial = nn.Module()
    trial.register_parameter(leaf, nn.Parameter(value.clone()))
    options: dict[str, Any] = {"orthogonal_map": name, "use_trivialization": trivialized}
    parametrizations.orthogonal(trial, leaf, **options)
    off = float((getattr(trial, leaf) - value).abs().amax())
    if not off <= 1e-4:
        condition = f"be a value of torch's {name} map, use_trivialization={trivialized}"
        remedy = "use the constrained weight as it is, or make the adapter with trivialization"
        raise ValueError(fail(called, condition, f"one {off:.1g} off", remedy))

    def change() -> list[Line]:
        release(owner, leaf)
        del owner.__dict__[FROM_TORCH][leaf]
        parametrizations.orthogonal(owner, leaf, **options)
        done = f"torch's parametrization, map {name}"
        return [(called, "rotation", _matrices(value), done)]

    return None, change


def _plain_config(config: Any) -> Any:
    """Return the config for plain peft."""
    if config.peft_type == "OFT":
        config.use_cayley_neumann = False
    elif config.peft_type == "ADALORA":
        config.orth_reg_weight = config.__dict__.pop(PENALTY, config.orth_reg_weight)
    else:
        config = _peft_parts().plain_config(config)
    return config
