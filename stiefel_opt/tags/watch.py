"""Warnings of modules with constrained weights: of replaced, loaded or averaged parameters.

The record on the module, a plain dict from parameter name to reading, is the source of truth; the
tag on the parameter is what optimizers see.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stiefel_opt.errors import CONSTRAINABLE, PARAMETRIZED, how_many, users_level
from stiefel_opt.numerics.device import (
    HostReader,
    LaggedReader,
    has_values,
    is_compiling,
    is_in_dynamo,
    lives_on,
    may_wait_for,
    no_autocast,
    reader_for,
    untraced,
    widened,
)
from stiefel_opt.numerics.distributed import gathered, is_sharded
from stiefel_opt.numerics.geometry import is_far, orthonormality_tolerance, scale_tolerance
from stiefel_opt.tags.manifold import Stiefel, manifold_of
from stiefel_opt.tags.parameter import UNSTATED, ManifoldParameter
from stiefel_opt.tags.points import kept_scale, largest_error, nearest, wrong_signs
from stiefel_opt.tags.trained import loses_training, relative_move

RECORDS: Final = "_stiefel_constraints"  # {parameter name: Stiefel}, in the owner's __dict__
KEEPS: Final = "_stiefel_keeps"  # names of parameters whose scale follows the loaded value
GROUPED: Final = "_stiefel_grouped"  # True where param_groups has written the readings down
PROJECTS: Final = "_stiefel_projects_loaded"  # True where a module projects loaded values itself


class LostTagWarning(UserWarning):
    """A constrained parameter was replaced by torch and would be trained without its constraint."""


def records_of(module: nn.Module) -> dict[str, Stiefel]:
    """Return the readings of the constrained parameters of a module itself, by name."""
    return module.__dict__.get(RECORDS, {})  # type: ignore[no-any-return]


def record(module: nn.Module, name: str, reading: Stiefel, *, keeps: bool = False) -> None:
    """Write a record; the first one also registers a hook that checks loaded values.

    With ``keeps`` the scale follows the loaded values.
    """
    if RECORDS not in module.__dict__:
        module.__dict__[RECORDS] = {}
        module.register_load_state_dict_pre_hook(_warn_if_off)  # type: ignore[no-untyped-call]
    module.__dict__[RECORDS][name] = reading
    others = module.__dict__.get(KEEPS, set()) - {name}
    module.__dict__[KEEPS] = others | {name} if keeps else others


def maps_of(model: nn.Module) -> list[Any]:
    """Return the ``ParametrizationList`` of each weight of :func:`stiefel_opt.orthogonal`."""
    return [
        module
        for module in model.modules()
        if isinstance(module, parametrize.ParametrizationList)
        and getattr(module[-1], "orthonormal", False)
    ]


def mark_maps(model: nn.Module) -> bool:
    """Mark the free tensors of :func:`stiefel_opt.orthogonal`; say whether there are some."""
    maps = maps_of(model)
    for module in maps:
        for parameter in module.parameters(recurse=False):
            parameter.computes_orthonormal = True
    return bool(maps)


@torch.no_grad()
def has_left(parameter: Tensor, reading: Stiefel) -> bool:
    """Say whether a weight is unconstrained, or was to leave the manifold and has left it."""
    if getattr(parameter, "is_plain_in_group", False):
        return True
    if not has_values(parameter) or not getattr(parameter, "is_unconstrained", False):
        return False
    error = float(largest_error(widened(parameter), reading))
    return is_far(error, parameter.detach()) and error < math.inf


class _Watched(dict[str, Any]):
    """The parameters of a module with records: a dict that checks writes and reads.

    Assigning a parameter without a tag registers a forward pre-hook, which checks the tags once and
    is removed: TorchScript and fast paths see no hook in other forward passes. Where the module has
    no forward pass, or another module reads its parameter, the read checks.
    """

    __slots__ = ("__dict__", "passes")  # a slot is read faster
    is_flat = False  # whether FullyShardedDataParallel holds the parameters
    silent = True  # until all is in place, as while a pickle is read
    passes: dict[str, Iterator[None]]  # of each record, as many items as reads may pass unseen

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self.records = records_of(module)
        self.hooks = module._forward_pre_hooks
        self.kind = type(module).__name__
        self.has_forward = type(module).forward is not nn.Module.forward
        self.schedules: dict[str, _CheckSchedule] = {}
        self.passes = _none_pass(self.records)
        self.silent = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy or pickle, whose parameters are to be checked."""
        return {**self.__dict__, "schedules": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.passes = _none_pass(self.records)

    @override
    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)  # faster than super(), as the loop is than next()
        if name in self.passes and not is_in_dynamo():
            for _ in self.passes[name]:
                return value
            if not (
                getattr(value, "is_stepped", True)
                and getattr(value, "requires_grad", True)
                and torch.is_grad_enabled()
            ):
                self.look(name, value)
        return value

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if (reading := self._reading_of(name)) is None:
            return
        is_swapped = _is_swapped(sys._getframe(1))
        if not is_swapped:
            self.schedules.pop(name, None)
        self.passes[name] = iter(())
        if isinstance(value, ManifoldParameter):
            if value.manifold is UNSTATED:  # type(p)(value) has no reading of its own
                value.manifold = reading
            self.records[name] = value.manifold  # of functional_call, until the former is back
            self.silent = False
        elif isinstance(value, nn.Parameter) and not (self.silent or is_swapped):
            self.arm()

    @override
    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if _is_flattened(sys._getframe(1)):
            if not self.is_flat and self._reading_of(name) is not None:  # then in each forward pass
                warnings.warn(FLAT.format(name), LostTagWarning, stacklevel=users_level())
                self.is_flat = True
        elif not self.silent and self._reading_of(name) is not None:
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

    def _reading_of(self, name: str) -> Stiefel | None:
        """Return the recorded reading, also before a pickle is complete; None in traced code."""
        return None if is_compiling() else self.__dict__.get("records", {}).get(name)

    @untraced
    def look(self, name: str, value: Any) -> None:
        """Warn of a value off the manifold, or of a package that quantises it."""
        is_given = type(value) is Tensor  # to functional_call
        if not (is_given or isinstance(value, ManifoldParameter)) or value.is_inference():
            return
        if name not in self.records:  # released
            self.passes[name] = itertools.repeat(None)
            return
        called = f"{name}, given" if is_given else name
        if (schedule := self.schedules.get(called)) is None:
            schedule = self.schedules[called] = _CheckSchedule()
        if not schedule.is_due(value):
            self.passes[name] = schedule.passes()
            return
        is_called, frame = False, cast("FrameType | None", sys._getframe(1))
        while frame is not None and not is_called:
            calling = frame.f_globals.get("__name__", "")
            if calling.startswith("torch.ao.nn.") and ".qat." not in calling:  # which trains
                schedule.is_over = True
                self.passes[name] = schedule.passes()
                warnings.warn(_CONVERTED.format(name, self.kind), stacklevel=users_level())
                return
            is_called, frame = frame.f_code is _CALL, frame.f_back
        if not is_called:  # to be projected, or initialised
            return
        schedule.note(
            value, self.warn_if_far(name, value, schedule, waits=not torch.is_grad_enabled())
        )
        self.passes[name] = schedule.passes()

    @torch.no_grad()
    def warn_if_far(
        self, name: str, value: Tensor, schedule: _CheckSchedule, *, waits: bool
    ) -> bool:
        """Warn of a weight off the manifold; return whether it need not be checked again."""
        if getattr(value, "is_unconstrained", False):
            return True
        if (
            not has_values(value)
            or value.dtype not in CONSTRAINABLE
            or not may_wait_for(value)
            or _get_current_dispatch_mode() is not None  # of this thread
            or torch.func.debug_unwrap(value) is not value
        ):
            return False
        reading = self.records[name]
        with no_autocast(value):
            reader = HostReader() if waits else reader_for(value, schedule.lagged)
            error = reader.number("error", lambda: largest_error(widened(value.detach()), reading))
        if error == math.inf or not is_far(error, value.detach()):  # inf: not known yet
            return False
        text = _FUNCTIONAL if type(value) is Tensor else _WRITTEN
        warnings.warn(text.format(name, self.kind, error), stacklevel=users_level())
        return True

    def arm(self) -> None:
        """Let the next forward pass, of the module or of one that reads it, check the tags."""
        if _warn_if_lost not in self.hooks.values():
            self.hooks[RemovableHandle(self.hooks).id] = _warn_if_lost
        self.__class__ = _Armed

    def warn_if_lost(self) -> None:
        """Warn once of recorded parameters without tag."""
        for name, reading in self.records.items():
            value = self.get(name)
            if not isinstance(value, nn.Parameter):
                return  # a tensor of functional_call or of a replica: look again
            if manifold_of(value) != reading and not self.silent:
                self.silent = True
                warnings.warn(_LOST.format(name, self.kind), LostTagWarning, users_level())
        self.disarm()

    def disarm(self) -> None:
        """Remove that hook."""
        self.__class__ = _Watched
        for key in [key for key, hook in self.hooks.items() if hook is _warn_if_lost]:
            self.hooks.pop(key, None)


class _Armed(_Watched):
    """The same while a tag may be lost."""

    __slots__ = ()

    @override
    def __getitem__(self, name: str) -> Any:
        if name in self.records:
            self.warn_if_read()
        return _Watched.__getitem__(self, name)  # the class may have changed

    @untraced
    def warn_if_read(self) -> None:
        """Check the tags in a forward pass; where the module has none, where gradients are on."""
        is_used = not self.has_forward and torch.is_grad_enabled()
        frame = cast("FrameType | None", sys._getframe(2))
        while frame is not None:
            if frame.f_code.co_name == "extra_repr":  # to be printed
                return
            is_used |= frame.f_code is _CALL
            frame = frame.f_back
        if is_used:
            self.warn_if_lost()


def _none_pass(names: Iterable[str]) -> dict[str, Iterator[None]]:
    """Return for each name how many reads may pass unseen: none yet."""
    return {name: iter(()) for name in names}


def _is_flattened(frame: FrameType | None) -> bool:
    """Say whether ``FullyShardedDataParallel`` takes a parameter away, by ``delattr``."""
    if frame is not None and frame.f_code is nn.Module.__delattr__.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_FSDP1)


def _is_swapped(frame: FrameType) -> bool:
    """Say whether ``torch.func.functional_call`` has put a parameter in, for one call."""
    return frame.f_globals.get("__name__") == "torch.nn.utils._named_member_accessor"


# ---- values that are off -----------------------------------------------------------------------

_WRITES: Final = 32  # between two looks in evaluations, at most
_PASSES: Final = 63  # reads without a look at the version, at most
_READS: Final = 16  # with gradients, before the second look
_CALL: Final = nn.Module._call_impl.__code__  # around every forward pass
_FSDP1: Final = "torch.distributed.fsdp._"
FLAT: Final = (
    "`{}` is constrained, and FullyShardedDataParallel (FSDP1) cuts it out of one flat parameter, "
    "in which no constraint can be read: shard by torch.distributed.fsdp.fully_shard (FSDP2), see "
    "docs/distributed.md"
)
_LOST: Final = (
    "`{}` of {} has lost its Stiefel tag because its parameter was replaced, and would be trained "
    "without its constraint; call so.retag(model), and then build the optimizer anew: it holds the "
    "former parameter"
)
_WRITTEN: Final = (
    "`{}` of {} is off the manifold, |X'X - I| = {:.0e}: it was written to, as the average of a "
    "training or a merged adapter is; call so.project_(model) before it is used, and for averages "
    "take so.averaged(model)"
)
_FUNCTIONAL: Final = (
    "`{}` of {} is off the manifold, |X'X - I| = {:.0e}, in a functional_call: project what that "
    "is given, so.project_(value, manifold), or take averages from so.averaged(model)"
)
_CONVERTED: Final = (
    "`{}` of {} is constrained, and is quantised: what is made of it is not orthonormal, and knows "
    "no constraint; use it for inference only, and train the model that it was made of"
)


@dataclasses.dataclass
class _CheckSchedule:
    """When the value of one parameter is checked again: seldom.

    Averages are read without gradients, or no optimizer steps them, and code that knows no
    constraint writes to them.
    """

    reads: int = 0
    next_read: int = 1
    next_version: int = 1
    writes: int = 1  # between two checks: more where the value stayed on the manifold
    is_over: bool = False
    lagged: LaggedReader = dataclasses.field(default_factory=LaggedReader)
    passing: Iterator[None] = dataclasses.field(default_factory=lambda: iter(()))
    passed: int = 0  # length of that

    def passes(self) -> Iterator[None]:
        """Return as many items as reads may pass before the next one that is counted."""
        if self.is_over:
            return itertools.repeat(None)
        self.passed = max(min(self.next_read - self.reads - 1, self.reads // 8, _PASSES), 0)
        self.passing = itertools.repeat(None, self.passed)
        return self.passing

    def is_due(self, value: Tensor) -> bool:
        self.reads += 1 + self.passed - operator.length_hint(self.passing)
        self.passing, self.passed = iter(()), 0
        is_due = self.reads >= self.next_read
        if torch.is_grad_enabled():  # an optimizer may be about to project what was written
            is_due &= self.reads == 1 or self.reads >= _READS
        else:
            is_due |= value._version >= self.next_version
        return is_due and not self.is_over

    def note(self, value: Tensor, is_over: bool) -> None:
        self.is_over, self.next_read = is_over, 2 * self.reads + 1
        if value._version >= self.next_version:
            self.writes = min(2 * self.writes, _WRITES)
        self.next_version = value._version + self.writes


def watch(module: nn.Module) -> None:
    """Watch for recorded parameters, now tagged, that are replaced."""
    parameters = module._parameters
    if type(parameters) is dict:
        parameters = module.__dict__["_parameters"] = _Watched(module)
    if isinstance(parameters, _Watched):  # another package may have a dict of its own
        parameters.disarm()
        # A sharded parameter is gathered into another object for the forward: nothing to watch.
        tagged = (isinstance(parameters[name], ManifoldParameter) for name in parameters.records)
        parameters.silent = not all(tagged)
        parameters.schedules = {
            name: _CheckSchedule(next_read=2, next_version=value._version + 1)
            for name, value in parameters.items()
            if name in parameters.records and value is not None and not value.is_inference()
        }
        parameters.passes = _none_pass(parameters.records)


@untraced
def _warn_if_lost(module: nn.Module, args: Any) -> None:  # noqa: ARG001
    """Hook before a forward pass: warn of a recorded parameter without tag."""
    if isinstance(module._parameters, _Watched):
        module._parameters.warn_if_lost()


def _name_parametrized(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, messages: list[str]
) -> None:
    """Add an error, or warn, where keys are those of a parametrization."""
    for leaf in records_of(module):
        factor = f"{prefix}parametrizations.{leaf}.original"
        if prefix + leaf not in state_dict and {factor, f"{factor}0"} & state_dict.keys():
            text = f"`{prefix}{leaf}` is saved as a parametrization, `{factor}`: {PARAMETRIZED}"
            if _is_strict(sys._getframe(2)):
                messages.append(text)
            else:
                warnings.warn(text, stacklevel=users_level())


def _is_strict(frame: FrameType | None) -> bool:
    """Say whether ``load_state_dict`` is strict, which its hooks are not told."""
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back
    return frame is None or bool(frame.f_locals["strict"])


def _rescaled(module: nn.Module, leaf: str, value: Tensor, name: str) -> Stiefel:
    """Return the reading of a weight with ``scale="keep"`` for a value that is being loaded."""
    reading, parameter = records_of(module)[leaf], module._parameters[leaf]
    try:
        scale = kept_scale(value, reading, name)
    except ValueError:  # zero, or not finite
        return reading
    tolerance = scale_tolerance(value.dtype, max(reading.heights(value.shape)))
    if abs(scale / reading.scale - 1) <= tolerance:
        return reading
    if module.__dict__.get(GROUPED, False):
        warnings.warn(
            f"`{name}` is loaded with a scale of {scale:g} and had {reading.scale:g} when "
            "so.param_groups was called: build the optimizer anew",
            stacklevel=users_level(),
        )
    rescaled = module.__dict__[RECORDS][leaf] = dataclasses.replace(reading, scale=scale)
    if isinstance(parameter, ManifoldParameter):
        parameter.manifold = rescaled
    return rescaled


def _warn_of_sign(name: str, loaded: Tensor, reading: Stiefel) -> None:
    """Warn of values that are being loaded and have the other determinant."""
    bad = wrong_signs(loaded, reading)
    if bool(bad.any()):
        where = "" if bad.numel() == 1 else how_many(bad)
        warnings.warn(
            f"`{name}` is loaded with the other determinant than {reading.determinant:+d}{where}, "
            "which no step changes; so.project_(model) takes the nearest point of that sign",
            stacklevel=users_level(),
        )


@torch.no_grad()
def _warn_if_off(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *others: Any,
) -> None:
    """Hook before ``load_state_dict``: warn of values that are off the manifold, by full name.

    Name the remedy where the keys are those of a parametrization.
    """
    _name_parametrized(module, state_dict, prefix, others[-1])
    if module.__dict__.get(PROJECTS, False):
        return
    for leaf, reading in list(records_of(module).items()):
        parameter, value = module._parameters.get(leaf), state_dict.get(prefix + leaf)
        if parameter is None or not isinstance(value, Tensor):
            continue
        if value.shape != parameter.shape or not has_values(value):
            continue  # torch refuses it
        if is_sharded(value) and not lives_on(value, value.device_mesh.device_type):
            continue  # offloaded: no process group can gather it
        loaded = gathered(value).to(parameter.dtype)
        if leaf in module.__dict__.get(KEEPS, ()):
            reading = _rescaled(module, leaf, loaded, prefix + leaf)
        error = float(largest_error(widened(loaded), reading))
        _warn_of_sign(prefix + leaf, loaded, reading)
        heights = reading.heights(parameter.shape)
        if error <= 10 * orthonormality_tolerance(parameter.dtype, max(heights)):
            continue  # NaN does not pass
        source = "" if value.dtype == parameter.dtype else f" in {value.dtype}"
        remedy = "call so.project_(model), or the first step projects"
        if metadata.get("assign_to_params_buffers") and not isinstance(value, ManifoldParameter):
            remedy = (
                "assign=True replaces the parameter: call so.retag, then so.project_(model), and "
                "build the optimizer anew"
            )
        if 0.1 < error < math.inf:
            share = relative_move(loaded, nearest(loaded, reading, leaf))
            if loses_training(loaded, reading, share):
                remedy += (
                    f". It seems trained, and moves by {share:.0%} of its length to be "
                    "orthonormal: what was learned there is lost. Train it on, with scale='keep' "
                    "in so.constrain if its norm matters, or leave it unconstrained"
                )
        if isinstance(module._parameters, _Watched):
            # one warning is enough
            module._parameters.schedules[leaf] = _CheckSchedule(is_over=True)
        warnings.warn(
            f"`{prefix}{leaf}` is loaded with values{source} that are off the manifold, "
            f"|X'X - I| = {error:.0e}; {remedy}",
            stacklevel=users_level(),
        )
