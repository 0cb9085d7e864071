"""Maps from free tensors to orthonormal matrices, as modules for ``torch.nn.utils.parametrize``."""

from stiefel_opt.parametrizations.base import Parametrization as Parametrization
from stiefel_opt.parametrizations.householder_maps import CWY as CWY
from stiefel_opt.parametrizations.householder_maps import TCWY as TCWY
from stiefel_opt.parametrizations.householder_maps import (
    GeneralizedHouseholder as GeneralizedHouseholder,
)
from stiefel_opt.parametrizations.householder_maps import Householder as Householder
from stiefel_opt.parametrizations.init import draw_rotation as draw_rotation
from stiefel_opt.parametrizations.init import helfrich as helfrich
from stiefel_opt.parametrizations.init import henaff as henaff
from stiefel_opt.parametrizations.init import householder_vectors as householder_vectors
from stiefel_opt.parametrizations.own import OWN as OWN
from stiefel_opt.parametrizations.own import own_map as own_map
from stiefel_opt.parametrizations.reflections import check_strengths as check_strengths
from stiefel_opt.parametrizations.reflections import cwy as cwy
from stiefel_opt.parametrizations.reflections import cwy_factors as cwy_factors
from stiefel_opt.parametrizations.reflections import (
    generalized_householder as generalized_householder,
)
from stiefel_opt.parametrizations.reflections import householder as householder
from stiefel_opt.parametrizations.reflections import tcwy as tcwy
from stiefel_opt.parametrizations.register import MAPS as MAPS
from stiefel_opt.parametrizations.register import orthogonal as orthogonal
from stiefel_opt.parametrizations.skew import MatrixExp as MatrixExp
from stiefel_opt.parametrizations.skew import ScaledCayley as ScaledCayley
from stiefel_opt.parametrizations.skew import Trivialization as Trivialization
from stiefel_opt.parametrizations.skew import cayley_map as cayley_map
from stiefel_opt.parametrizations.skew import exponential_map as exponential_map
from stiefel_opt.parametrizations.unitary import EURNN as EURNN
from stiefel_opt.parametrizations.unitary import URNN as URNN
from stiefel_opt.parametrizations.unitary import eurnn as eurnn
from stiefel_opt.parametrizations.unitary import urnn as urnn
