"""From a model to its constraints and on to an optimizer: constrain, retag, param_groups.

The record on the module, a plain dict from parameter name to reading, is the source of truth;
the tag on the parameter is what optimizers see and can be restored from the record at any time.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stiefel_opt._checks import check_dtype, check_flag, fail, find_parameter
from stiefel_opt.device import is_compiling
from stiefel_opt.distributed import is_sharded
from stiefel_opt.geometry import gram_error, orthonormality_tolerance, polar_factor, widened
from stiefel_opt.manifold import CONVOLUTIONS, ManifoldParameter, Stiefel, manifold_of, tag

__all__ = ["LostTagWarning", "constrain", "param_groups", "project_", "readings", "retag"]

RECORDS = "_stiefel_constraints"  # {parameter name: Stiefel}, in the owner's __dict__
PROJECTS = "_stiefel_projects_loaded"  # True where a module projects what it loads by itself

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class LostTagWarning(UserWarning):
    """A constrained parameter was replaced by torch and would be trained without its constraint."""


# ---- constrain ---------------------------------------------------------------------------------


def constrain(
    module: ModuleT,
    name: str = "weight",
    *,
    heads: int | Sequence[int] | None = None,
    rows: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
    flatten: bool | None = None,
    transposed: bool = False,
    scale: float = 1.0,
    project: bool = True,
) -> ModuleT:
    r"""Put a parameter of ``module`` on the Stiefel manifold and return the module.

    Choose this with the optimizers of this package where a step should be cheap and follow the
    geometry; choose :func:`stiefel_opt.orthogonal` where another optimizer should train the weight.

    The value becomes the nearest point, ``scale`` times the polar factor of each matrix; matrices
    that are there already stay bit for bit. The parameter object stays the same, so optimizers,
    hooks and tied modules keep it; keys and shapes of ``state_dict`` do not change.

    Args:
        module: Owner of the parameter, or one of its ancestors.
        name: The parameter, dotted below an ancestor: ``"encoder.q.weight"``.
        heads, rows, transposed, scale: The reading, see :class:`Stiefel`.
        flatten: Read ``(C_out, C_in, *kernel)`` as ``(C_out, C_in * prod(kernel))``. Default: True
            for convolutions. A transposed convolution stores ``(C_in, C_out, *kernel)`` and is
            read as the convolution whose adjoint it is, one row for each input channel. For a
            grouped convolution pass ``heads=groups``: its groups never meet.
        project: False leaves the value as it is; the first step with lr > 0 projects it.

    Raises:
        ValueError: for an unknown name, or a value that cannot be read so or is not finite.
        TypeError: for a dtype that has no fraction, or less than float16, and for values that
            should be projected and are sharded already.

    Note:
        Parameters on the meta device are recorded and tagged, not projected. Where torch replaces
        the parameter (``to_empty``, ``fully_shard``, ``load_state_dict(assign=True)``) the tag is
        lost but the record stays: call :func:`retag` or :func:`param_groups`. The next forward pass
        warns of it (:class:`LostTagWarning`); no other one is looked at, and costs nothing. Loading
        values that are off the manifold, from bfloat16 or another training, warns: call
        :func:`project_`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(fail("module", "be a torch.nn.Module", type(module).__name__))
    check_flag("project", project)
    owner, leaf, parameter = find_parameter(module, name)
    manifold_of(parameter, name)  # another package's is no reading: refused
    if flatten is None:
        flatten = isinstance(owner, CONVOLUTIONS) and parameter.ndim > 2
    reading = Stiefel(heads, rows, flatten, transposed, scale)  # type: ignore[arg-type]
    reading.check(parameter.shape, name)
    check_dtype(name, parameter.dtype)
    if project and is_sharded(parameter):
        remedy = (
            "call so.constrain before fully_shard, or let the first step project: project=False"
        )
        raise TypeError(fail(name, "not be sharded to be projected", "a DTensor", remedy))
    if project and not parameter.is_meta:
        _project(parameter, reading, name)
    if RECORDS not in owner.__dict__:
        owner.__dict__[RECORDS] = {}
        owner.register_load_state_dict_pre_hook(_warn_if_off)  # type: ignore[no-untyped-call]
        if isinstance(owner, NonDynamicallyQuantizableLinear):
            owner.register_load_state_dict_post_hook(_warn_if_lost)  # type: ignore[no-untyped-call]
    owner.__dict__[RECORDS][leaf] = reading
    tag(parameter, reading)
    _watch(owner)
    return module


def project_(model: ModuleT) -> ModuleT:
    """Replace in place every constrained matrix of ``model`` by the nearest point; return it.

    For values that came from elsewhere: a checkpoint in bfloat16, averaged or merged weights,
    weights that have drifted. Matrices that are orthonormal up to rounding stay bit for bit, and so
    do plain rows. Parameters in half precision are projected in float32 and rounded; those on the
    meta device are skipped. The momentum of an optimizer is not touched: the next step takes the
    part of it that is tangent at the new point; of StiefelSGD, whose momentum U refers to the point
    that the last step wrote, up to lr |U| times the length of the edit.

    Args:
        model: A model with constrained parameters.

    Returns: The model.
    Raises:
        ValueError: for values that are not finite, naming the parameter, or if nothing in the model
            is constrained.
        TypeError: if ``model`` is not a module.

    Note: One singular value decomposition for each matrix that is off, and a host sync.
    """
    found = [(name, *item) for name, item in readings(model).items() if item[1] is not None]
    if not found:
        kind, remedy = type(model).__name__, "call so.constrain first"
        raise ValueError(fail("model", "have a constrained parameter", f"a {kind} of none", remedy))
    for name, parameter, reading in found:
        if reading is not None and not parameter.is_meta:
            _project(parameter, reading, name)
    return model


@torch.no_grad()
def _project(parameter: nn.Parameter, reading: Stiefel, name: str) -> None:
    """Replace in place every matrix that is off the manifold by the nearest point."""
    pending = []
    for index, part in enumerate(reading.parts(parameter)):
        matrices = widened(reading.matrices(part, index))
        if not bool(torch.isfinite(matrices).all()):
            raise ValueError(
                fail(
                    name,
                    "be finite to be projected",
                    f"shape {tuple(parameter.shape)} with infinities or NaN",
                    "initialise it first",
                )
            )
        tolerance = orthonormality_tolerance(parameter.dtype, matrices.size(-2))
        off = ~(gram_error(matrices / reading.scale) <= tolerance)  # overflows count
        if bool(off.any()):
            nearest = matrices.clone()
            nearest[off] = reading.scale * polar_factor(matrices[off])
            pending.append((part, reading.stored(nearest, part.shape, index)))
    for part, value in pending:
        part.copy_(value)


# ---- replaced parameters -----------------------------------------------------------------------


class _Watched(dict[str, Any]):
    """The ``_parameters`` of a module with records: sees that torch replaces one of them.

    Only then is a forward pre-hook there, which looks at the tags once: other forward passes are
    those of the module without constraint, and TorchScript and fast paths find no hook.
    """

    silent = True  # until all is in place, as while a pickle is read

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self.records = _records(module)
        self.hooks = module._forward_pre_hooks
        self.silent = False

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self.silent or is_compiling() or name not in self.records:
            return
        if isinstance(value, ManifoldParameter):  # type(p)(value) has no reading of its own
            value.manifold = self.records[name]
        elif isinstance(value, nn.Parameter):
            self.arm()

    @override
    def items(self) -> Any:
        """Return the items; where torch would swap tensors, so that none is replaced, arm too."""
        if not self.silent and torch.__future__.get_swap_module_params_on_conversion():
            self.arm()
        return super().items()

    def arm(self) -> None:
        """Let the next forward pass look for lost tags."""
        if _warn_if_lost not in self.hooks.values():
            self.hooks[RemovableHandle(self.hooks).id] = _warn_if_lost

    def disarm(self) -> None:
        """Take the hook away."""
        for key in [key for key, hook in self.hooks.items() if hook is _warn_if_lost]:
            self.hooks.pop(key, None)


def _watch(module: nn.Module) -> None:
    """See from now on that a recorded parameter, now tagged, is replaced."""
    parameters = module._parameters
    if type(parameters) is dict:
        parameters = module.__dict__["_parameters"] = _Watched(module)
    if isinstance(parameters, _Watched):  # another package may have a dict of its own
        parameters.disarm()
        # A sharded parameter is gathered into another object for the forward: nothing to watch.
        tagged = (isinstance(parameters[name], ManifoldParameter) for name in parameters.records)
        parameters.silent = not all(tagged)


def _warn_if_lost(module: nn.Module, args: Any) -> None:  # noqa: ARG001
    """Hook before a forward pass, or after loading: warn of a recorded parameter without tag."""
    parameters = module._parameters
    if is_compiling() or not isinstance(parameters, _Watched):
        return
    for name, reading in parameters.records.items():
        if not isinstance(parameters.get(name), nn.Parameter):
            return  # a tensor of functional_call or of a replica: look again
        if manifold_of(parameters[name]) != reading and not parameters.silent:
            parameters.silent = True
            warnings.warn(
                f"`{name}` of {type(module).__name__} has lost its Stiefel tag because its "
                "parameter was replaced, and would be trained without its constraint; call "
                "so.retag(model), or build the optimizer from so.param_groups(model)",
                LostTagWarning,
                stacklevel=2,
            )
    parameters.disarm()


@torch.no_grad()
def _warn_if_off(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    *args: Any,  # noqa: ARG001
) -> None:
    """Hook before ``load_state_dict``: warn of values that are off the manifold, by full name."""
    if module.__dict__.get(PROJECTS, False):
        return
    for leaf, reading in _records(module).items():
        parameter, value = module._parameters.get(leaf), state_dict.get(prefix + leaf)
        if parameter is None or not isinstance(value, Tensor) or is_sharded(value):
            continue
        if value.shape != parameter.shape or value.is_meta:
            continue  # torch refuses it, or there is nothing to see
        stored = value.detach().to(parameter.dtype)
        off = []
        for index, part in enumerate(reading.parts(stored)):
            matrices = widened(reading.matrices(part, index)) / reading.scale
            error = float(gram_error(matrices).amax())
            if not error <= 10 * orthonormality_tolerance(parameter.dtype, matrices.size(-2)):
                off.append(error)  # also NaN
        if off:
            source = "" if value.dtype == parameter.dtype else f" in {value.dtype}"
            warnings.warn(
                f"`{prefix}{leaf}` is loaded with values{source} that are off the manifold, "
                f"|X'X - I| = {max(off):.0e}; call so.project_(model), or the first step projects",
                stacklevel=2,
            )


# ---- the records -------------------------------------------------------------------------------


def _records(module: nn.Module) -> dict[str, Stiefel]:
    return module.__dict__.get(RECORDS, {})  # type: ignore[no-any-return]


def readings(model: nn.Module) -> dict[str, tuple[nn.Parameter, Stiefel | None]]:
    """Return every parameter once, under its first name, with its reading or None.

    A record wins over a tag; a tag without record counts.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(fail("model", "be a torch.nn.Module", type(model).__name__))
    recorded: dict[int, tuple[str, Stiefel]] = {}
    for prefix, module in model.named_modules():
        for leaf, reading in _records(module).items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            parameter = module._parameters.get(leaf)
            if parameter is None:
                raise ValueError(
                    fail(
                        name,
                        "still be a parameter: it is constrained",
                        "none of that name",
                        "undo what replaced it (a parametrization, pruning) and use only one",
                    )
                )
            reading.check(parameter.shape, name)
            other, known = recorded.setdefault(id(parameter), (name, reading))
            if known != reading:
                raise ValueError(
                    fail(
                        f"{other} and {name}",
                        "be constrained alike: they are one tied parameter",
                        f"{known} and {reading}",
                    )
                )
    found: dict[str, tuple[nn.Parameter, Stiefel | None]] = {}
    for name, parameter in model.named_parameters():
        record = recorded.get(id(parameter))
        found[name] = parameter, record[1] if record else manifold_of(parameter, name)
    return found


def retag(model: ModuleT) -> ModuleT:
    """Restore the tag of every parameter that :func:`constrain` recorded; return the model.

    Needed where torch has replaced parameters; values are not touched. Call it before the
    optimizer is built, since an optimizer holds the parameters themselves.

    Args:
        model: A model, of which :func:`constrain` recorded what it did.

    Returns: The model.
    Raises:
        ValueError: if a record no longer fits its parameter, or two disagree about a tied one.
        TypeError: if ``model`` is not a module.
    """
    for parameter, reading in readings(model).values():
        if reading is not None:
            tag(parameter, reading)
    for module in model.modules():
        if _records(module):
            _watch(module)
    return model


def param_groups(
    model: nn.Module,
    *,
    stiefel: Mapping[str, Any] | None = None,
    plain: Mapping[str, Any] | None = None,
    names: bool = False,
    **common: Any,
) -> list[dict[str, Any]]:
    """Return parameter groups of ``model`` for any optimizer of this package; calls :func:`retag`.

    One group holds the plain parameters, and one each those with the same reading, which the group
    carries under the key ``"stiefel"``. Tied parameters appear once, frozen ones too, as in
    ``model.parameters()``.

    Args:
        model: The model.
        stiefel: Options of the constrained groups, such as ``{"lr": 1e-2}``. Default: none.
        plain: Options of the plain group. Default: none.
        names: Give ``(name, parameter)`` pairs, as ``model.named_parameters()`` does. Default: no.
        common: Options of all groups; ``stiefel`` and ``plain`` override them.

    Returns: The groups, the plain one first; empty ones are left out.
    Raises:
        ValueError: as :func:`retag`, or if an option is called ``params`` or ``stiefel``.
        TypeError: if ``model`` is not a module, or options are no dict.
    """
    check_flag("names", names)
    options = {"common": common, "stiefel": stiefel or {}, "plain": plain or {}}
    for kind, mapping in options.items():
        if not isinstance(mapping, Mapping):
            raise TypeError(fail(kind, "be a dict of options", repr(mapping)))
        if taken := sorted({"params", "stiefel"} & set(mapping)):
            raise ValueError(fail(kind, f"not set {taken[0]!r}", repr(mapping[taken[0]])))
    retag(model)
    members: dict[Stiefel | None, list[Any]] = {None: []}
    for name, (parameter, reading) in readings(model).items():
        members.setdefault(reading, []).append((name, parameter) if names else parameter)
    groups = []
    for reading, params in members.items():
        if params:
            mine = options["plain" if reading is None else "stiefel"]
            key = False if reading is None else reading.as_dict()
            groups.append({"params": params, **common, **mine, "stiefel": key})
    return groups
