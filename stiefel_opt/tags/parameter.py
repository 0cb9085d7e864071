"""The tag on a parameter that says how it is constrained: what optimizers see."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from stiefel_opt.errors import check_type, check_writable
from stiefel_opt.numerics.device import has_values, untraced
from stiefel_opt.numerics.distributed import is_sharded
from stiefel_opt.tags.foreign import note_tag
from stiefel_opt.tags.manifold import Stiefel, manifold_of
from stiefel_opt.tags.points import reading_of
from stiefel_opt.tags.trained import FirstPoints

UNSTATED: Final = Stiefel()  # the tag of ``type(parameter)(value)``, until a module knows better
# Ids of parameters whose tag `untag` removed. An id may come back with another parameter, which
# lacks the attribute that `untag` leaves. torch swaps no tensor that has a weak reference.
_RELEASED: Final[set[int]] = set()


class ManifoldParameter(nn.Parameter):
    r"""An ``nn.Parameter`` whose tag ``.manifold`` says how it is constrained.

    For a parameter of a module :func:`stiefel_opt.constrain` also makes a record, which restores
    the tag where torch replaces the parameter.

    Args:
        data: The value. What is off the manifold becomes the nearest point, in a copy; a point
            keeps its bits and its memory. A scale that is learned starts as that of ``manifold``.
        manifold: The reading. Default: that of ``data`` if it is tagged, else ``Stiefel()``, by
            which the last two dimensions are one matrix.
        requires_grad: As in ``nn.Parameter``. Default: True.
        project: False leaves the value as it is; the first optimizer step with lr > 0 projects it.
            Values on the meta device and DTensors are never projected.

    Raises:
        ValueError: if ``data`` cannot be read as ``manifold`` says, or is not finite.
        TypeError: if ``data`` is not a tensor of numbers with a fraction, or ``manifold`` not a
            :class:`Stiefel`.
    """

    manifold: Stiefel
    is_unconstrained: bool  # where leaving the manifold is intended
    is_stepped: bool = False  # whether an optimizer trains it
    is_plain_in_group: bool = False  # whether a group says that it is unconstrained

    def __new__(
        cls,
        data: Tensor,
        manifold: Stiefel | None = None,
        requires_grad: bool = True,
        *,
        project: bool = True,
    ) -> Self:
        check_type("data", data, Tensor, "be a tensor")
        stated = manifold is not None or manifold_of(data) is not None
        manifold = reading_of(data, manifold, "data")
        if isinstance(data, ManifoldParameter):
            data = data.data
        if cls is ManifoldParameter:
            cls = _Tagged  # type: ignore[assignment]
            stated = True
            if project and has_values(data) and not is_sharded(data):
                remedy = "initialise it first, or pass project=False"
                points = FirstPoints()
                point, _ = points.nearest("data", data, manifold, remedy)
                points.warn()
                data = data if point is None else point
        parameter = super().__new__(cls, data, requires_grad)
        parameter.manifold = manifold if stated else UNSTATED
        _RELEASED.discard(id(parameter))
        note_tag()
        return parameter

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        data = self.data.clone(memory_format=torch.preserve_format)
        copied = type(self)(data, self.manifold, self.requires_grad)
        for mark in vars(self).keys() & {"is_unconstrained", "is_plain_in_group"}:
            setattr(copied, mark, True)
        memo[id(self)] = copied
        return copied

    @override
    def detach(self) -> Tensor:
        """Return a plain tensor; inside ``nn.Parameter(self)``, which requires it, our type."""
        plain = super().detach()
        return type(self)(plain, self.manifold) if _is_in_constructor() else plain

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        attributes = {name: it for name, it in self.__dict__.items() if name != "is_stepped"}
        return _rebuild, (type(self), self.data, self.requires_grad, attributes)

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        value = self.detach().requires_grad_(self.requires_grad)
        return f"ManifoldParameter on {self.manifold}:\n{value}"


class _Tagged(ManifoldParameter):
    """The type of every tagged parameter: unlike its base it takes any value.

    ``type(parameter)(value)``, as torch and accelerate make parameters, knows no reading yet.
    """


@untraced
def _is_in_constructor() -> bool:
    """Say whether ``nn.Parameter`` asks for the value of the parameter that it is given."""
    return sys._getframe(3).f_code is nn.Parameter.__new__.__code__  # past detach and a decorator


def _rebuild(
    cls: type[ManifoldParameter], data: Tensor, requires_grad: bool, attributes: dict[str, Any]
) -> ManifoldParameter:
    parameter = cls(data, attributes["manifold"], requires_grad, project=False)
    parameter.__dict__.update(attributes)
    return parameter


# torch.load(weights_only=True), its default, reads parameters that are saved with their tags.
torch.serialization.add_safe_globals([ManifoldParameter, _Tagged, Stiefel, _rebuild])


def tag(parameter: nn.Parameter, manifold: Stiefel) -> None:
    """Tag ``parameter`` in place, so that optimizers, hooks and tied modules keep their object."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = _Tagged
    parameter.manifold = manifold  # type: ignore[attr-defined]
    _RELEASED.discard(id(parameter))
    note_tag()


def untag(parameter: nn.Parameter) -> None:
    """Take the tag away, in place."""
    if isinstance(parameter, ManifoldParameter):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    del parameter.manifold  # type: ignore[attr-defined]
    parameter.is_released = True  # type: ignore[attr-defined]
    _RELEASED.add(id(parameter))


def was_released(parameter: Tensor) -> bool:
    """Say whether a tag was taken away, as by ``release``."""
    return id(parameter) in _RELEASED and hasattr(parameter, "is_released")


def recalled(parameters: Iterable[Tensor], earlier: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
    """Return the tag of each parameter, or None; put back one of ``earlier`` that is lost.

    ``torch.utils.swap_tensors``, by which a module may convert its parameters, exchanges their
    attributes, the tag among them, while the parameter stays the same object.
    """
    tags: dict[Tensor, Any] = {}
    for parameter in parameters:
        before = earlier.get(parameter)
        is_missing = not hasattr(parameter, "manifold") and id(parameter) not in _RELEASED
        if is_missing and isinstance(before, Stiefel):
            tag(parameter, before)  # type: ignore[arg-type]
        tags[parameter] = getattr(parameter, "manifold", None)
    return tags


@torch.no_grad()
def project_untagged(parameters: Sequence[Tensor], key: bool | Mapping[str, Any] | None) -> None:
    """Project in place, and tag, the ``parameters`` of a group that are untagged.

    For the ``key`` "stiefel" of a group, when it is added: the first forward pass then sees a
    point, and averages and reports a tag, as of a :class:`ManifoldParameter`. Tagged parameters
    stay as they are; DTensors and those on the meta device are only tagged. With the key False
    parameters are marked: all of a gradient moves them.

    Raises:
        ValueError: for values that are not finite or cannot be read so; nothing is changed then.
    """
    if key is None or key is False:
        mark_unconstrained(parameters, key is False)
        return
    manifold = Stiefel() if key is True else Stiefel.from_dict(key)
    moved: list[tuple[Any, Tensor | None]] = []
    points = FirstPoints()
    for parameter in parameters:
        if manifold_of(parameter) is None:
            name = f"parameter of shape {tuple(parameter.shape)}"
            manifold.check(parameter.shape, name)
            point = None
            if has_values(parameter) and not is_sharded(parameter):
                check_writable(name, parameter)
                point, _ = points.nearest(name, parameter, manifold)
            moved.append((parameter, point))
    points.warn()  # which raises where warnings are errors
    for parameter, point in moved:
        if point is not None:
            parameter.copy_(point)
        tag(parameter, manifold)
    mark_unconstrained(parameters, False)


def mark_unconstrained(parameters: Iterable[Any], is_whole: bool) -> None:
    """Mark parameters that a group trains without their constraint, or no longer."""
    for parameter in parameters:
        if is_whole:
            parameter.is_plain_in_group = True
        else:
            vars(parameter).pop("is_plain_in_group", None)
