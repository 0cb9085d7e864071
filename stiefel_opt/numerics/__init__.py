"""Numbers and products: devices, linear algebra of tall batches, geometry of the manifold."""

from stiefel_opt.numerics.device import has_values as has_values
