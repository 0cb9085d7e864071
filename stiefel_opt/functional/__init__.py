"""Pure functions on batches of matrices, tensors in and tensors out: update rules and maps."""

from stiefel_opt.functional.delta import delta_product as delta_product
from stiefel_opt.functional.flows import Length as Length
from stiefel_opt.functional.momentum import adam as adam
from stiefel_opt.functional.momentum import bias_correction as bias_correction
from stiefel_opt.functional.momentum import evaluated as evaluated
from stiefel_opt.functional.momentum import metric_parameter as metric_parameter
from stiefel_opt.functional.momentum import sgd as sgd
from stiefel_opt.functional.own import own as own
from stiefel_opt.functional.radius import with_radius as with_radius
from stiefel_opt.functional.recurrence import rollout as rollout
from stiefel_opt.functional.reflections import cwy as cwy
from stiefel_opt.functional.reflections import cwy_factors as cwy_factors
from stiefel_opt.functional.reflections import generalized_householder as generalized_householder
from stiefel_opt.functional.reflections import householder as householder
from stiefel_opt.functional.reflections import tcwy as tcwy
from stiefel_opt.functional.retractions import move_along_cayley as move_along_cayley
from stiefel_opt.functional.retractions import project_tangent as project_tangent
from stiefel_opt.functional.retractions import retract as retract
from stiefel_opt.functional.retractions import retract_along as retract_along
from stiefel_opt.functional.skew_maps import cayley_map as cayley_map
from stiefel_opt.functional.skew_maps import exponential_map as exponential_map
from stiefel_opt.functional.unitary import eurnn as eurnn
from stiefel_opt.functional.unitary import urnn as urnn
from stiefel_opt.numerics.geodesics import logarithm as logarithm
from stiefel_opt.numerics.linalg import Sums as Sums
