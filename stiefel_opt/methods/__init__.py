"""Other methods: adaptive and published flows, descent, Cayley maps, Muon, L-BFGS."""

from stiefel_opt.methods.adaptive import AdaptiveAdam as AdaptiveAdam
from stiefel_opt.methods.adaptive import AdaptiveSGD as AdaptiveSGD
from stiefel_opt.methods.adaptive import adaptive_adam as adaptive_adam
from stiefel_opt.methods.adaptive import adaptive_sgd as adaptive_sgd
from stiefel_opt.methods.cayley import CayleyAdam as CayleyAdam
from stiefel_opt.methods.cayley import CayleySGD as CayleySGD
from stiefel_opt.methods.cayley import cayley_adam as cayley_adam
from stiefel_opt.methods.cayley import cayley_sgd as cayley_sgd
from stiefel_opt.methods.descent import ProjectedRGD as ProjectedRGD
from stiefel_opt.methods.descent import rgd as rgd
from stiefel_opt.methods.lbfgs import StiefelLBFGS as StiefelLBFGS
from stiefel_opt.methods.minimize import Minimum as Minimum
from stiefel_opt.methods.minimize import minimize as minimize
from stiefel_opt.methods.muon import StiefelMuon as StiefelMuon
from stiefel_opt.methods.muon import muon as muon
from stiefel_opt.methods.muon import spectral_direction as spectral_direction
from stiefel_opt.methods.muon import spectral_gap as spectral_gap
from stiefel_opt.methods.published import PublishedAdam as PublishedAdam
from stiefel_opt.methods.published import PublishedSGD as PublishedSGD
from stiefel_opt.methods.published import published_adam as published_adam
from stiefel_opt.methods.published import published_sgd as published_sgd
from stiefel_opt.methods.retractions import move_along_cayley as move_along_cayley
from stiefel_opt.methods.retractions import retract_along as retract_along
