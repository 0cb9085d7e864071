"""Maps from free tensors to orthonormal matrices, as modules for ``torch.nn.utils.parametrize``."""

from stiefel_opt.parametrizations.base import Parametrization
from stiefel_opt.parametrizations.householder import (
    CWY,
    TCWY,
    GeneralizedHouseholder,
    Householder,
)
from stiefel_opt.parametrizations.init import helfrich, henaff, householder_vectors
from stiefel_opt.parametrizations.own import OWN
from stiefel_opt.parametrizations.register import MAPS, orthogonal
from stiefel_opt.parametrizations.skew import MatrixExp, ScaledCayley, Trivialization
from stiefel_opt.parametrizations.unitary import EURNN, URNN

__all__ = [
    "CWY",
    "EURNN",
    "MAPS",
    "OWN",
    "TCWY",
    "URNN",
    "GeneralizedHouseholder",
    "Householder",
    "MatrixExp",
    "Parametrization",
    "ScaledCayley",
    "Trivialization",
    "helfrich",
    "henaff",
    "householder_vectors",
    "orthogonal",
]
