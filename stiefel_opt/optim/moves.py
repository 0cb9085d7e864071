"""What a rule may return, checked at its first step, and weights that no step can mend."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from stiefel_opt.errors import fail, users_level
from stiefel_opt.functional.flows import Length, Tensors
from stiefel_opt.numerics.geometry import FAR, gram_error, orientation
from stiefel_opt.numerics.linalg import Sums, square_norm
from stiefel_opt.optim.state import State


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
