"""What a module with records watches for: parameters that are replaced, values that are loaded.

The record on the module, a plain dict from parameter name to reading, is the source of truth; the
tag on the parameter is what optimizers see.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stiefel_opt._checks import users_level
from stiefel_opt.device import is_compiling
from stiefel_opt.distributed import is_sharded
from stiefel_opt.geometry import gram_error, orthonormality_tolerance, widened
from stiefel_opt.manifold import Stiefel, manifold_of
from stiefel_opt.parameter import ManifoldParameter

RECORDS: Final = "_stiefel_constraints"  # {parameter name: Stiefel}, in the owner's __dict__
PROJECTS: Final = "_stiefel_projects_loaded"  # True where a module projects what it loads by itself


class LostTagWarning(UserWarning):
    """A constrained parameter was replaced by torch and would be trained without its constraint."""


def records_of(module: nn.Module) -> dict[str, Stiefel]:
    """Return the records of a module itself: what it has constrained, by name."""
    return module.__dict__.get(RECORDS, {})  # type: ignore[no-any-return]


def record(module: nn.Module, name: str, reading: Stiefel) -> None:
    """Write a record, and see from the first one on what is loaded."""
    if RECORDS not in module.__dict__:
        module.__dict__[RECORDS] = {}
        module.register_load_state_dict_pre_hook(_warn_if_off)  # type: ignore[no-untyped-call]
        if isinstance(module, NonDynamicallyQuantizableLinear):
            module.register_load_state_dict_post_hook(_warn_if_lost)  # type: ignore[no-untyped-call]
    module.__dict__[RECORDS][name] = reading


def mark_maps(model: nn.Module) -> bool:
    """Mark the free tensors of :func:`stiefel_opt.orthogonal`; say whether there are some."""
    maps = [
        module
        for module in model.modules()
        if isinstance(module, parametrize.ParametrizationList)
        and getattr(module[-1], "orthonormal", False)
    ]
    for module in maps:
        for parameter in module.parameters(recurse=False):
            parameter.computes_orthonormal = True  # type: ignore[attr-defined]
    return bool(maps)


class _Watched(dict[str, Any]):
    """The ``_parameters`` of a module with records: sees that torch replaces one of them.

    Only then is a forward pre-hook there, which looks at the tags once: other forward passes are
    those of the module without constraint, and TorchScript and fast paths find no hook.
    """

    silent = True  # until all is in place, as while a pickle is read

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self.records = records_of(module)
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
    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if not (self.silent or is_compiling()) and name in self.records:
            warnings.warn(
                f"`{name}` is constrained, and is no parameter any more: what computes it now (a "
                "parametrization, pruning) would not keep it orthonormal; undo that, or call "
                "so.release first",
                LostTagWarning,
                stacklevel=users_level(),
            )

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


def watch(module: nn.Module) -> None:
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
                stacklevel=users_level(),
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
    for leaf, reading in records_of(module).items():
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
                stacklevel=users_level(),
            )
