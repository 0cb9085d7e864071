"""What a rule is, what it may return, and weights that no step can mend."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from stiefel_opt.errors import fail, users_level
from stiefel_opt.functional.flows import Length, Move, Scalar, Tensors
from stiefel_opt.functional.learned_scale import with_learned_scale
from stiefel_opt.numerics.device import Reader
from stiefel_opt.numerics.geometry import FAR, gram_error, orientation
from stiefel_opt.numerics.linalg import Sums, square_norm
from stiefel_opt.optim.state import State


class Rule(Protocol):
    """A pure function that moves a batch: what an optimizer of this package is about.

    Args:
        X: Points, ``(k, n, m)`` with n >= m, orthonormal.
        G: Gradients, same shape, finite.
        state: What ``state_for`` declares, by name: batches ``(k, n, m)``, ``(k, m, m)`` or
            ``(k, 1, 1)``.
        lr: The learning rate eta for orthonormal X, a number or a tensor.
        step: t >= 1, the number of this step: one for all, or ``(k, 1, 1)``.
        sums: ``sums((A, B), ...)`` returns A'B, ``(k, m, m)``, for each pair; ``sums.add(a)`` adds
            ``(k, ., .)`` over processes. Rows may be on several processes: a rule forms every sum
            over rows by these.
        reader: Reads numbers that decide the amount of work: this step's on a CPU, an earlier
            step's on accelerators. Pass it on to ``retract``.

    Returns: The new points; the new state by name, where it has changed; and the length of the
        step, the largest singular value of its tangent vector: a number, ``(k, 1, 1)``, or a
        :class:`Length`.
    """

    def __call__(
        self,
        X: Tensor,
        G: Tensor,
        state: Tensors,
        /,
        *,
        lr: Scalar,
        step: Scalar,
        sums: Sums,
        reader: Reader,
    ) -> Move:
        """Return the new points, the new state and the length of the step; write to nothing."""


class Correction(Protocol):
    """The part of an optimizer that removes rounding from a batch."""

    def __call__(
        self, X: Tensor, state: Mapping[str, Tensor], sums: Sums, gram: Tensor | None = None, /
    ) -> tuple[Tensor, Tensors]:
        """Return the corrected point, and the state that has changed; ``gram`` is X'X."""


class ScaleRule(NamedTuple):
    """How a learned scale g moves beside Q.

    Attributes:
        step: As :func:`stiefel_opt.functional.learned_scale.sgd_scale`; None: it cannot.
        state: What it keeps.
        is_embedded: Whether Q moves along G / g, as steps are as long as their gradients.
    """

    step: Any = None
    state: tuple[State, ...] = ()
    is_embedded: bool = False

    def beside(self, rule: Rule, norm: Tensor) -> Rule:
        """Return a rule that moves a scale as well; ``norm`` is that of the weight."""
        bound = partial(with_learned_scale, rule, self.step, norm)
        return partial(bound, is_embedded=self.is_embedded)


def _unbound(rule: Any) -> Any:
    """Return a rule below the options that are bound to it."""
    while isinstance(rule, partial):
        rule = next((each for each in rule.args if callable(each)), rule.func)
    return rule


def _called(rule: Any) -> str:
    """Return the name of a rule."""
    rule = _unbound(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def refuse_write(rule: Any) -> NoReturn:
    """Raise for a rule that has written to its point or its gradient."""
    remedy = "let it compute new tensors"
    raise ValueError(fail(_called(rule), "write to nothing that it is given", "a write", remedy))


def is_foreign(rule: Any) -> bool:
    """Say whether a rule is not of this package: its points are looked at in every step."""
    module = str(getattr(_unbound(rule), "__module__", ""))
    return module.partition(".")[0] != __name__.partition(".")[0]


def is_stale(state: Tensors, fixed: Tensors, sums: Sums) -> bool:
    """Say whether a momentum belongs to another point: it is off the tangent space of this one."""
    matrices = [t for t in state.values() if t.size(-2) > 1]  # not numbers beside them
    if not (fixed and matrices):
        return False
    squares = torch.stack([square_norm(t) for t in matrices])
    size = sums.add(squares.sum(dim=0)).sqrt()
    eps = torch.finfo(size.dtype).eps
    changes = [(state[name] - tensor).abs() > 1e3 * eps * size for name, tensor in fixed.items()]
    return any(bool(change.any()) for change in changes)


def check_move(rule: Any, X: Tensor, declared: Mapping[str, State], move: Any) -> None:
    """Raise for what no rule may return, before anything is written."""
    if not isinstance(move, tuple) or len(move) != 3:
        wanted = "return the point, a dict of new state and the length of the step"
        raise TypeError(fail(_called(rule), wanted, type(move).__name__))
    (new_X, new, length), (count, n, m) = move, X.shape
    pairs: list[tuple[str, Any, tuple[torch.Size, ...]]] = [("point", new_X, (X.shape,))]
    if not isinstance(new, dict) or not new.keys() <= declared.keys():
        given = sorted(new) if isinstance(new, dict) else type(new).__name__
        wanted = f"be a dict with names of {sorted(declared)}"
        raise ValueError(fail(f"new state of {_called(rule)}", wanted, given, "declare the rest"))
    for name, tensor in new.items():
        pairs.append((name, tensor, (declared[name].shape_for(count, n=n, m=m),)))
    if not isinstance(length, (Length, numbers.Real)):
        pairs.append(("length", length, (torch.Size((count, 1, 1)), torch.Size())))
    for name, tensor, allowed in pairs:
        if not isinstance(tensor, Tensor) or tensor.shape not in allowed:
            wanted = f"be a tensor of shape {tuple(allowed[0])}"
            raise ValueError(fail(f"{name} that {_called(rule)} returns", wanted, tensor))


def warn_if_off(rule: Any, new_X: Tensor) -> None:
    """Warn of a rule whose step leaves the manifold, where a number may be read."""
    error = float(gram_error(new_X).amax())
    if FAR < error < math.inf:
        warnings.warn(
            f"{_called(rule)} returned points that are off the manifold, |X'X - I| = {error:.0e}; "
            "let it end with stiefel_opt.functional.retract",
            stacklevel=users_level(),
        )


def warn_of_sign(points: Tensor, determinant: int) -> None:
    """Warn of orthonormal weights with the other determinant than their reading: they keep it."""
    wrong = orientation(points) * determinant < 0
    if bool(wrong.any()):
        warnings.warn(
            f"weights of shape {tuple(points.shape[1:])}, {int(wrong.sum())} of them, have the "
            f"other determinant than {determinant:+d}, which no step changes; so.project_(model) "
            "takes the nearest point of that sign",
            stacklevel=users_level(),
        )
