"""Pure functions on batches of matrices, tensors in and tensors out: update rules."""

from stiefel_opt.functional.flows import Length as Length
from stiefel_opt.functional.momentum import adam as adam
from stiefel_opt.functional.momentum import bias_correction as bias_correction
from stiefel_opt.functional.momentum import evaluated as evaluated
from stiefel_opt.functional.momentum import metric_parameter as metric_parameter
from stiefel_opt.functional.momentum import sgd as sgd
from stiefel_opt.functional.radius import with_radius as with_radius
from stiefel_opt.functional.retractions import move_along_cayley as move_along_cayley
from stiefel_opt.functional.retractions import project_tangent as project_tangent
from stiefel_opt.functional.retractions import retract as retract
from stiefel_opt.functional.retractions import retract_along as retract_along
from stiefel_opt.numerics.linalg import Sums as Sums
