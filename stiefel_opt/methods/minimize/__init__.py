"""One call that minimises a loss over points: L-BFGS, one start after the other or all at once.

The frames are those of :class:`StiefelLBFGS`. Pairs are not rotated: a slope along a line is that
of the coordinates of the direction, so that its Wolfe condition is s'y > 0. Inner products of pairs
are computed once, and an iteration takes two products with all pairs and two triangular solves.
"""

from stiefel_opt.methods.minimize.call import minimize as minimize
from stiefel_opt.methods.minimize.descent import Minimum as Minimum
