"""Numbers and products: devices, linear algebra of tall batches, geometry of the manifold."""

from stiefel_opt.numerics.device import has_values as has_values
from stiefel_opt.numerics.geodesics import logarithm as logarithm
from stiefel_opt.numerics.geodesics import principal_logarithm as principal_logarithm
from stiefel_opt.numerics.geometry import orientation as orientation
