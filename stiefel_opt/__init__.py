"""Optimizers that keep tagged weights exactly on the Stiefel manifold."""

__version__ = "0.1.0"
