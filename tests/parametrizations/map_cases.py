"""The table of maps that `test_maps_*.py` and `test_parametrizations.py` walk through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.parametrizations import (
    cayley_map,
    cwy,
    eurnn,
    exponential_map,
    generalized_householder,
    householder,
    own_map,
    tcwy,
    urnn,
)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def orthonormal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Orthonormal columns, or rows where the matrices are wide."""
    wide = shape[-2] < shape[-1]
    tall = (*shape[:-2], shape[-1], shape[-2]) if wide else shape
    basis = torch.linalg.qr(gaussian(*tall, seed=seed, dtype=dtype)).Q
    return basis.mT.contiguous() if wide else basis


def with_determinant(square: Tensor, sign: float) -> Tensor:
    """Negate the first column where the determinant has the other sign."""
    square = square.clone()
    square[..., 0] *= (torch.linalg.det(square).sign() * sign).unsqueeze(-1)
    return square


def error_of(point: Tensor) -> float:
    point = point.detach()
    gram = point.mH @ point
    return float((gram - torch.eye(gram.size(-1), dtype=gram.dtype)).abs().max())


@dataclass(frozen=True)
class FunctionCase:
    """A pure function with free tensors of one shape."""

    name: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float64
    orthonormal: bool = True

    def free(self, seed: int = 0, lead: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        return tuple(
            gaussian(*lead, *shape, seed=seed + 10 * k, dtype=self.dtype).requires_grad_()
            for k, shape in enumerate(self.shapes)
        )


def _urnn(phases: Tensor, vectors: Tensor) -> Tensor:
    permutation = torch.randperm(phases.size(-1), generator=torch.Generator().manual_seed(1))
    return urnn(phases.real, vectors, permutation)


def _eurnn(phases: Tensor, angles: Tensor) -> Tensor:
    return eurnn(phases.real, angles.real)


def _generalized(keys: Tensor, gates: Tensor) -> Tensor:
    return generalized_householder(keys, 2 * torch.sigmoid(gates.real))


C128 = torch.complex128
FUNCTIONS = {
    case.name: case
    for case in (
        FunctionCase("householder", householder, ((5, 3),)),
        FunctionCase("householder-complex", householder, ((4, 4),), C128),
        FunctionCase("cwy-square", cwy, ((5, 5),)),
        FunctionCase("cwy-columns", lambda v: cwy(v, 3), ((6, 4),)),
        FunctionCase("cwy-complex", cwy, ((4, 3),), C128),
        FunctionCase("tcwy", tcwy, ((7, 3),)),
        FunctionCase("tcwy-complex", tcwy, ((5, 2),), C128),
        FunctionCase("exponential-square", exponential_map, ((4, 4),)),
        FunctionCase("exponential-complex", exponential_map, ((5, 2),), C128),
        FunctionCase(
            "exponential-based", lambda p: exponential_map(p, orthonormal(7, 2)), ((7, 2),)
        ),
        FunctionCase("cayley-square", cayley_map, ((4, 4),)),
        FunctionCase("cayley-complex", cayley_map, ((5, 2),), C128),
        FunctionCase("cayley-based", lambda p: cayley_map(p, orthonormal(7, 2)), ((7, 2),)),
        FunctionCase("own", own_map, ((6, 3),)),
        FunctionCase("own-complex", own_map, ((6, 2),), C128),
        FunctionCase("urnn", _urnn, ((3, 4), (4, 2)), C128),
        FunctionCase("urnn-one", _urnn, ((3, 1), (1, 2)), C128),
        FunctionCase("eurnn-odd", _eurnn, ((3,), (3, 2, 1)), C128),
        FunctionCase("generalized", _generalized, ((5, 3), (3,)), orthonormal=False),
        FunctionCase("generalized-many", _generalized, ((3, 5), (5,)), orthonormal=False),
    )
}


@dataclass(frozen=True)
class MapCase:
    """A map by name with the shapes of weights (of `nn.Linear`, or a bare parameter) it takes."""

    name: str
    map: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    invertible: bool = True

    @property
    def manifold(self) -> so.Stiefel:
        keys = ("heads", "flatten", "transposed", "scale")
        return so.Stiefel(**{key: self.options[key] for key in keys if key in self.options})

    def module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A module with a Gaussian weight, not yet parametrized."""
        module = nn.Module()
        module.weight = nn.Parameter(gaussian(*self.shape, seed=3, dtype=dtype or self.dtype))
        return module

    def registered(self, dtype: torch.dtype | None = None, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        return so.orthogonal(
            self.module(dtype), "weight", self.map, generator=generator, **self.options
        )


KINDS: dict[str, dict[str, Any]] = {
    "square": {"shape": (5, 5)},
    "even": {"shape": (4, 4)},
    "tall": {"shape": (9, 3)},
    "wide": {"shape": (3, 5)},
    "one": {"shape": (5, 1)},
    "batch": {"shape": (2, 3, 6, 2)},
    "batch-square": {"shape": (3, 4, 4)},
    "complex": {"shape": (4, 4), "dtype": C128},
    "complex-tall": {"shape": (6, 2), "dtype": C128},
}
USED = {  # how matrices are read is the same code for every map
    "householder": ("square", "batch", "complex-tall"),
    "cwy": ("even", "tall", "complex"),
    "tcwy": ("square", "one", "complex-tall"),
    "matrix_exp": ("square", "wide", "complex"),
    "cayley": ("even", "tall", "complex-tall"),
    "trivialization": ("square", "batch-square", "complex-tall"),
}
MAPS = {
    case.name: case
    for case in (
        *(MapCase(f"{name}-{kind}", name, **KINDS[kind]) for name in USED for kind in USED[name]),
        MapCase("cwy-few", "cwy", (6, 6), {"reflections": 2}),
        MapCase("cwy-few-batch", "householder", (2, 5, 5), {"reflections": 4}),
        MapCase("cwy-few-complex", "cwy", (3, 5, 5), {"reflections": 3}, dtype=C128),
        MapCase("cwy-many", "cwy", (6, 2), {"reflections": 5}),
        MapCase("trivialization-often", "trivialization", (6, 3), {"every": 2}),
        MapCase("tcwy-conv", "tcwy", (4, 3, 2, 2), {"flatten": True, "scale": 0.5}),
        MapCase("tcwy-transposed", "tcwy", (9, 6), {"transposed": True, "heads": 2}),
        MapCase("own-tall", "own", (6, 3)),
        MapCase("own-heads", "own", (6, 9), {"heads": 2, "scale": 2.0}),
        MapCase("own-complex", "own", (6, 3), dtype=C128),
        MapCase("urnn-batch", "urnn", (2, 4, 4), dtype=C128, invertible=False),
        MapCase("eurnn-odd-batch", "eurnn", (2, 5, 5), dtype=C128),
        MapCase("eurnn-many", "eurnn", (4, 4), {"layers": 5}, dtype=C128),
        MapCase("eurnn-few", "eurnn", (5, 5), {"layers": 2}, dtype=C128, invertible=False),
    )
}
