"""L-BFGS on the manifold: its direction, its line search, its optimizer."""

from stiefel_opt.methods.lbfgs.optimizer import StiefelLBFGS as StiefelLBFGS
