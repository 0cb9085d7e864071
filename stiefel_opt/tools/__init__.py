"""Functions for existing models and loops: attention, adapters, migration, clipping, logging."""

from stiefel_opt.tools.adapters import AdapterReport as AdapterReport
from stiefel_opt.tools.adapters import constrain_adapters as constrain_adapters
from stiefel_opt.tools.adapters import export_adapters as export_adapters
from stiefel_opt.tools.attention import AttentionReport as AttentionReport
from stiefel_opt.tools.attention import constrain_attention as constrain_attention
from stiefel_opt.tools.clipping import clip_grad_norm_ as clip_grad_norm_
from stiefel_opt.tools.logging import log_orthonormality as log_orthonormality
from stiefel_opt.tools.logging import orthonormality_errors as orthonormality_errors
from stiefel_opt.tools.migration import from_geoopt as from_geoopt
from stiefel_opt.tools.migration import from_geotorch as from_geotorch
from stiefel_opt.tools.migration import from_torch_orthogonal as from_torch_orthogonal
from stiefel_opt.tools.transformer import TransformerReport as TransformerReport
from stiefel_opt.tools.transformer import constrain_transformer as constrain_transformer
