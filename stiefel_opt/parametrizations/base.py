"""Base class of the maps: reading of the weight, registration that keeps it, assignment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from stiefel_opt.errors import PARAMETRIZED, fail
from stiefel_opt.numerics import (
    finest_dtype,
    gram_error,
    has_values,
    orientation,
    polar,
    working_dtype,
)
from stiefel_opt.parametrizations.init import with_determinant
from stiefel_opt.tags import Stiefel, check_phase, warn_if_not_unique

Free = Tensor | tuple[Tensor, ...]


class BaseOptions(TypedDict, total=False):
    """Options of every map, for signatures of subclasses."""

    manifold: Stiefel | None
    generator: torch.Generator | None


class Parametrization(nn.Module):
    """Free tensors -> a weight of orthonormal matrices, for ``torch.nn.utils.parametrize``.

    A subclass gives :meth:`point` and its inverse :meth:`free`. Before it is registered a module
    maps free tensors to matrices ``(..., n, m)``. The first ``right_inverse``, which torch calls on
    registration, takes the nearest matrix that the map reaches, or a random one where the map has
    no inverse; later ones are assignments (``module.weight = Q``), an error if Q is not reached.

    Args:
        manifold: How the weight is read as matrices. Default ``Stiefel()``; no ``rows``.
        generator: Source of random initial values. Default: torch's global one.
    Raises:
        ValueError: for a manifold with ``rows``; on registration for a weight that the map has no
            matrices for, or that is not finite; on assignment for one that is not orthonormal or
            not reached.
        TypeError: for a manifold that is not a :class:`stiefel_opt.Stiefel`, integer weights, or an
            assignment of another dtype.
    """

    orthonormal = True  # whether reports should expect it
    buffer_names: tuple[str, ...] = ()  # None until registration, then written in place

    def __init__(
        self, *, manifold: Stiefel | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        manifold = Stiefel() if manifold is None else manifold
        if not isinstance(manifold, Stiefel):
            raise TypeError(fail("manifold", "be a Stiefel", repr(manifold)))
        if manifold.rows is not None:
            remedy = "tag the parameter with so.constrain"
            raise ValueError(fail("manifold", "have no rows", manifold, remedy))
        if manifold.learn_scale:
            remedy = "multiply what the layer returns by a parameter"
            raise ValueError(fail("learn_scale of manifold", "be False for a map", True, remedy))
        self.manifold = manifold
        self.generator = generator
        self.shape: torch.Size | None = None
        # Where there is one the last row is negated, for the determinant of the manifold. A buffer:
        # the same free tensors are another weight without it.
        self.turned: Tensor | None
        self.register_buffer("turned", None)
        self.dtype: torch.dtype | None = None  # of the weight
        for name in self.buffer_names:
            self.register_buffer(name, None)

    # ---- what a subclass gives -----------------------------------------------------------------

    def point(self, *free: Tensor) -> Tensor:
        """Return the orthonormal matrices ``(..., n, m)`` of the free tensors."""
        raise NotImplementedError

    def free(self, point: Tensor) -> Free | None:  # noqa: ARG002
        """Return free tensors of ``point`` or of a near one; None: no inverse is known."""
        return None

    def reach(self) -> str:
        """Say what the map reaches, for an error message."""
        return "orthonormal"

    def determinant(self, n: int) -> int | None:  # noqa: ARG002
        """Return the determinant of real n x n matrices that are reached; None: 1 and -1."""
        return None

    def component(self) -> Tensor | None:
        """Return the signs of the determinants that the buffers choose; None: they do not."""
        return None

    def start(self, point: Tensor) -> Free:
        """Return initial free tensors for the orthonormal ``point``, or near it."""
        is_real_square = point.size(-2) == point.size(-1) and not point.is_complex()
        if is_real_square and (sign := self.determinant(point.size(-1))) is not None:
            point = with_determinant(point, sign)
        if (free := self.free(point)) is None:
            raise NotImplementedError
        return free

    def check(self, n: int, m: int, dtype: torch.dtype) -> None:
        """Raise unless the map has matrices of this kind."""

    def starts_at_random(self, m: int) -> bool:  # noqa: ARG002
        """Say whether matrices of m columns cannot be reproduced on registration."""
        return False

    def _set_buffer(self, name: str, value: Tensor) -> None:
        """Write ``value`` into a buffer; the first value becomes the buffer."""
        if (buffer := getattr(self, name)) is None:
            setattr(self, name, value)
        else:
            buffer.copy_(value)

    # ---- for torch -----------------------------------------------------------------------------

    @override
    def forward(self, *free: Tensor) -> Tensor:
        point = self.point(*free)
        if self.shape is None:
            return point
        if self.turned is not None:
            point = _turned(point)
        if self.manifold.scale != 1.0:
            point = self.manifold.scale * point
        if self.dtype is not point.dtype:  # after load_state_dict(assign=True)
            self.dtype = point.dtype
        return self.manifold.stored(point, self.shape)

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Free:
        """Return free tensors of ``weight``: see the class."""
        matrices = self._read(weight)
        if self.shape is not None:
            if weight.dtype != self.dtype:
                condition = f"have dtype {self.dtype} to be assigned"
                raise TypeError(fail("weight", condition, weight.dtype, "convert it"))
            return self._assigned(matrices, weight.dtype)
        self.check(matrices.size(-2), matrices.size(-1), weight.dtype)
        wanted, n = self.manifold.determinant, matrices.size(-1)
        check_phase(wanted, weight, "weight")
        error = gram_error(matrices)
        off = error > 1e-10
        if wanted is not None:
            off |= orientation(matrices) * wanted < 0
        if bool(off.any()):
            matrices, gap = polar(matrices, wanted)
            if not self.starts_at_random(n):  # of the other determinant it is told already
                warn_if_not_unique("weight", gap.masked_fill(error < 1e-3, 1.0), weight.dtype)
        reached = None if wanted is None else self.determinant(n)
        if reached is not None and reached != wanted:
            matrices = _turned(matrices)
            self.turned = torch.ones((), dtype=torch.bool, device=weight.device)
        free: Free = _cast(self.start(matrices), weight.dtype)
        self.shape, self.dtype, self.generator = weight.shape, weight.dtype, None
        for name, buffer in self.named_buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                setattr(self, name, _cast(buffer, working_dtype(weight.dtype)))
        return free

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the buffers; name the remedy where another parametrization was saved."""
        own = _shapes(self.state_dict(prefix=prefix), prefix)
        given = _shapes(state_dict, prefix)
        original = prefix[: -len("0.")] + "original"
        if own != given and f"{prefix}base" in given:
            (*_, messages) = others
            text = f"`{original}` is that of another parametrization than {type(self).__name__}"
            messages.append(f"{text}: {PARAMETRIZED}")
        super()._load_from_state_dict(state_dict, prefix, *others)
        (_, strict, *_, messages) = others
        is_turned, was_turned = self.turned is not None, f"{prefix}turned" in state_dict
        is_other = is_turned != was_turned and (was_turned or strict)
        wanted, reached = self.manifold.determinant, self.component()
        if wanted is not None and reached is not None and has_values(reached):
            is_other |= bool((reached * wanted * (-1 if is_turned else 1) < 0).any())
        if is_other:
            condition = f"have the determinant of this map, determinant={wanted}, to be loaded"
            remedy = "parametrize by the `determinant` with which it was saved"
            messages.append(fail(original, condition, "the other one", remedy))

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the dtype of the weight in ``to`` and its like."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.dtype is not None:
            self.dtype = fn(torch.empty(1, dtype=self.dtype)).dtype
        return self

    def _assigned(self, matrices: Tensor, dtype: torch.dtype) -> Free:
        """Return free tensors that give ``matrices``, or raise and restore the buffers."""
        tolerance, name = math.sqrt(torch.finfo(dtype).eps), type(self).__name__
        error = float(gram_error(matrices).max())
        if not error <= tolerance:
            times = "" if self.manifold.scale == 1.0 else f"{self.manifold.scale:g} times "
            condition, value = f"be {times}orthonormal to be assigned", f"an error of {error:.1e}"
            given = "value" if self.manifold == Stiefel() else "value, manifold of this map"
            remedy = f"assign so.project_({given}), the nearest such matrix"
            raise ValueError(fail("weight", condition, value, remedy))
        wanted = self.manifold.determinant
        if wanted is not None and bool((orientation(matrices) * wanted < 0).any()):
            condition = f"have determinant {wanted:+d} to be assigned"
            raise ValueError(fail("weight", condition, "the other one"))
        if self.turned is not None:
            matrices = _turned(matrices)
        before = {key: buffer.clone() for key, buffer in self.named_buffers()}
        if (inverse := self.free(matrices)) is None:
            condition = f"be set through the free tensors of {name}"
            remedy = "the map has no inverse: load a state_dict"
            raise ValueError(fail("weight", condition, "a matrix", remedy))
        free: Free = _cast(inverse, dtype)
        reached = self.point(*(free if isinstance(free, tuple) else (free,)))
        distance = float((reached.to(matrices.dtype) - matrices).abs().max())
        if not distance <= 10 * tolerance:
            for key, buffer in before.items():
                self.get_buffer(key).copy_(buffer)
            condition = f"be {self.reach()} to be assigned to {name}"
            remedy = "'trivialization' and 'cayley' reach every matrix"
            raise ValueError(fail("weight", condition, "another matrix", remedy))
        return free

    def _read(self, weight: Tensor) -> Tensor:
        """Return the matrices of the weight in double precision, without its scale."""
        if self.shape is not None and weight.shape != self.shape:
            raise ValueError(fail("weight", f"have shape {tuple(self.shape)}", tuple(weight.shape)))
        self.manifold.check(weight.shape, "weight")
        if not (weight.is_floating_point() or weight.is_complex()):
            raise TypeError(fail("weight", "have a floating-point dtype", weight.dtype))
        if not has_values(weight):
            raise ValueError(fail("weight", "have values", "a meta tensor", "materialise it first"))
        if not bool(torch.isfinite(weight).all()):
            remedy = "initialise it first"
            raise ValueError(fail("weight", "be finite", "infinities or NaN", remedy))
        return self.manifold.matrices(weight.to(finest_dtype(weight))) / self.manifold.scale

    @override
    def extra_repr(self) -> str:
        return "" if self.shape is None else self.manifold.describe(self.shape)


def _turned(point: Tensor) -> Tensor:
    """Return square matrices with the last row negated."""
    return torch.cat([point[..., :-1, :], -point[..., -1:, :]], dim=-2)


def _cast(free: Any, dtype: torch.dtype) -> Any:
    if isinstance(free, tuple):
        return tuple(_cast(tensor, dtype) for tensor in free)
    return free.to(dtype if free.is_complex() else dtype.to_real()).contiguous()


def _shapes(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
    return {key: getattr(value, "shape", None) for key, value in found.items()}
