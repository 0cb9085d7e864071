"""Numbers and products: devices, linear algebra of tall batches, geometry of the manifold."""
