"""Parts of peft with orthonormal factors; imported where peft is used, and needs it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from stiefel_opt.errors import fail, imported
from stiefel_opt.numerics import has_values
from stiefel_opt.tags import constrain, random_point

_PEFT: Final = "'peft>=0.21'"
_peft = imported("peft", _PEFT)
_oft = imported("peft.tuners.oft.layer", _PEFT)
_adalora = imported("peft.tuners.adalora.layer", _PEFT)
_lora = imported("peft.tuners.lora.model", _PEFT)
_tuners = imported("peft.tuners.tuners_utils", _PEFT)
_mapping = imported("peft.mapping", _PEFT)

if not hasattr(_tuners.BaseTuner, "_get_adapter_state_dict"):
    raise ImportError(
        fail("peft", "be version 0.21 or newer", _peft.__version__, f"run: pip install {_PEFT}")
    )


class _Kind(str, enum.Enum):
    """The type of an adapter as adapter_config.json has it, in the form of peft's ``PeftType``."""

    STELLA = "STELLA"

    __str__ = str.__str__


STELLA = _Kind.STELLA
TunerLayer: Any = _tuners.BaseTunerLayer
OFTLayer: Any = _oft.OFTLayer
OFTRotation: Any = _oft.OFTRotationModule
AdaLoraLayer: Any = _adalora.AdaLoraLayer
LoraConfig: Any = _peft.LoraConfig
LoraModel: Any = _lora.LoraModel


class ExactRotation(OFTRotation):  # type: ignore[misc]
    """The rotation of one layer under OFT, whose blocks (r, b, b) are its parameter.

    All else is peft's: the shared block, patches of convolutions, merging.
    """

    def _cayley_batch(self, blocks: Tensor, *_: Any) -> Tensor:
        return blocks


# ---- StelLA ------------------------------------------------------------------------------------


class InputFactor(nn.Module):
    r"""What LoRA calls A: :math:`S V^\top`, the rows of ``basis`` orthonormal, ``core`` any.

    Args:
        rank, in_features: Sizes r and n of the basis (r, n).
        core: Value of the core (r, r).
        like: A tensor of the wanted dtype and device.
    """

    def __init__(self, rank: int, in_features: int, core: Tensor, like: Tensor) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.basis = nn.Parameter(torch.empty(rank, in_features, **options))
        self.core = nn.Parameter(core.to(like))

    @property
    def weight(self) -> Tensor:
        """The matrix that LoRA would have, (r, n)."""
        return self.core @ self.basis

    @override
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.basis), self.core)


@dataclasses.dataclass
class StellaConfig(LoraConfig):  # type: ignore[misc]
    r"""LoRA with three factors: :math:`W + (\alpha/r)\, U S V^\top`, U and V orthonormal.

    The columns of U (out x r) and V (in x r) are on the Stiefel manifold and tagged; S (r x r) is
    unconstrained. Train them by an optimizer of this package. Initialisation: U and V at random, S
    zero, so that the function does not change; with ``init_lora_weights=False`` S is the identity,
    as in the authors' code. peft saves, loads and merges such adapters as others; import
    ``so.StellaConfig`` before loading one. :func:`stiefel_opt.export_adapters` makes it a plain
    LoRA adapter of rank r.

    Args:
        r, lora_alpha, lora_dropout, target_modules, rank_pattern, ...: As in ``peft.LoraConfig``.
            Defaults: peft's.

    Raises:
        ValueError: for variants of LoRA (DoRA, biases, other initialisations), when it is made; for
            layers that are not linear, or narrower than r, when it is applied, before anything is
            changed.
        ImportError: without peft.

    Reference: Li, Sajadmanesh, Li & Lyu, StelLA (NeurIPS 2025), arXiv 2510.01938.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = STELLA
        if not isinstance(self.init_lora_weights, bool):
            remedy = "False starts at a core of one, True at zero"
            given = repr(self.init_lora_weights)
            raise ValueError(fail("init_lora_weights", "be True or False", given, remedy))
        variants = ("use_dora", "use_bdlora", "lora_bias", "target_parameters", "layer_replication")
        for field in dataclasses.fields(self):
            known = field.name in variants or field.metadata.get("is_lora_variant")
            if known and getattr(self, field.name):
                given, remedy = repr(getattr(self, field.name)), "take peft.LoraConfig for it"
                raise ValueError(fail(field.name, "be left out for StelLA", given, remedy))


class StellaModel(LoraModel):  # type: ignore[misc]
    """A model with StelLA adapters: that of LoRA, with another factor A and a tagged B."""

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Refuse layers before the first one is replaced."""
        super()._prepare_model(peft_config, model)
        if peft_config.peft_type != STELLA:
            return
        config = _tuners._maybe_include_all_linear_layers(peft_config, model)
        for path, module in model.named_modules():
            if path and self._check_target_module_exists(config, path):
                layer = module.get_base_layer() if isinstance(module, TunerLayer) else module
                _check_layer(layer, path, _rank(config, path))

    def _create_and_replace(
        self, lora_config: Any, adapter_name: str, *place: Any, **options: Any
    ) -> None:
        super()._create_and_replace(lora_config, adapter_name, *place, **options)
        if lora_config.peft_type != STELLA:  # a sum of exported adapters
            return
        _, target_name, parent, *_ = place  # after the module that was there
        layer: Any = parent.get_submodule(target_name)
        layer.lora_A[adapter_name] = self._factors(layer, adapter_name, lora_config)

    def _factors(self, layer: Any, adapter: str, config: Any) -> InputFactor:
        old, output = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        rank, size = old.shape
        core = torch.zeros(rank, rank) if config.init_lora_weights else torch.eye(rank)
        factor = InputFactor(rank, size, core, old)
        factor.requires_grad_(old.requires_grad)
        with torch.no_grad():
            for parameter in (factor.basis, output):
                if has_values(parameter):
                    parameter.copy_(random_point(*parameter.shape))
        constrain(factor, "basis", flatten=False)
        constrain(layer.lora_B[adapter], "weight", flatten=False)
        return factor

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Widen as peft does, and tag the new parameters, whose rounding is removed."""
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for layer in self.modules():
            held = layer.lora_A if isinstance(layer, _lora.LoraLayer) else {}
            if adapter_name in held and isinstance(held[adapter_name], InputFactor):
                constrain(held[adapter_name], "basis", flatten=False)
                constrain(layer.lora_B[adapter_name], "weight", flatten=False)

    def add_weighted_adapter(self, adapters: list[str], *args: Any, **options: Any) -> None:
        """Refused before they are exported: a sum of three factors has not their form."""
        if any(self.peft_config[name].peft_type == STELLA for name in adapters):
            remedy = "call so.export_adapters(model) first"
            raise ValueError(fail("adapters", "be plain LoRA to be summed", STELLA, remedy))
        super().add_weighted_adapter(adapters, *args, **options)


def plain_config(config: Any) -> Any:
    """Return the config of plain LoRA with the same settings."""
    fields = [field.name for field in dataclasses.fields(LoraConfig) if field.init]
    settings = {name: getattr(config, name) for name in fields if name != "peft_type"}
    return LoraConfig(**settings)


def _rank(config: Any, path: str) -> int:
    key = _lora.get_pattern_key(config.rank_pattern.keys(), path)
    rank: int = config.rank_pattern.get(key, config.r)
    return rank


def _check_layer(layer: nn.Module, path: str, rank: int) -> None:
    sizes = _tuners._get_in_out_features(layer)
    is_linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    if not is_linear or None in sizes:
        remedy = "leave it out of target_modules"
        raise ValueError(fail(path, "be a linear layer for StelLA", type(layer).__name__, remedy))
    if not 0 < rank <= min(sizes):
        condition = f"have a rank between 1 and {min(sizes)}, its smaller width"
        raise ValueError(fail(path, condition, rank, "set r, or rank_pattern for this layer"))


def _register() -> None:
    """Make the type known to peft, whose own function asks for a member of its enumeration."""
    if STELLA not in _mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
        _mapping.PEFT_TYPE_TO_CONFIG_MAPPING[STELLA] = StellaConfig
        _mapping.PEFT_TYPE_TO_TUNER_MAPPING[STELLA] = StellaModel
        _mapping.PEFT_TYPE_TO_PREFIX_MAPPING[STELLA] = StellaModel.prefix


_register()
