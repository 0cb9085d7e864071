"""Pure functions on batches of matrices, tensors in and tensors out: update rules and maps."""

from stiefel_opt.functional.cayley import cayley_adam_ as cayley_adam_
from stiefel_opt.functional.cayley import cayley_sgd_ as cayley_sgd_
from stiefel_opt.functional.delta import delta_product as delta_product
from stiefel_opt.functional.descent import descend_ as descend_
from stiefel_opt.functional.flows import Setting as Setting
from stiefel_opt.functional.flows import metric_parameter as metric_parameter
from stiefel_opt.functional.own import own as own
from stiefel_opt.functional.recurrence import rollout as rollout
from stiefel_opt.functional.reflections import cwy as cwy
from stiefel_opt.functional.reflections import cwy_factors as cwy_factors
from stiefel_opt.functional.reflections import generalized_householder as generalized_householder
from stiefel_opt.functional.reflections import householder as householder
from stiefel_opt.functional.reflections import tcwy as tcwy
from stiefel_opt.functional.skew_maps import cayley_map as cayley_map
from stiefel_opt.functional.skew_maps import exponential_map as exponential_map
from stiefel_opt.functional.stiefel_adam import Moments as Moments
from stiefel_opt.functional.stiefel_adam import adam_ as adam_
from stiefel_opt.functional.stiefel_muon import muon_ as muon_
from stiefel_opt.functional.stiefel_muon import spectral_direction as spectral_direction
from stiefel_opt.functional.stiefel_muon import spectral_gap as spectral_gap
from stiefel_opt.functional.stiefel_sgd import Deferred as Deferred
from stiefel_opt.functional.stiefel_sgd import Velocity as Velocity
from stiefel_opt.functional.stiefel_sgd import sgd_ as sgd_
from stiefel_opt.functional.unitary import eurnn as eurnn
from stiefel_opt.functional.unitary import urnn as urnn
