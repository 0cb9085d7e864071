"""Into other people's training code: attention modules, migration, clipping, logging."""

from stiefel_opt.integrations.attention import AttentionReport, constrain_attention
from stiefel_opt.integrations.clipping import clip_grad_norm_
from stiefel_opt.integrations.logging import log_orthonormality
from stiefel_opt.integrations.migration import from_geoopt, from_geotorch, from_torch_orthogonal

__all__ = [
    "AttentionReport",
    "clip_grad_norm_",
    "constrain_attention",
    "from_geoopt",
    "from_geotorch",
    "from_torch_orthogonal",
    "log_orthonormality",
]
