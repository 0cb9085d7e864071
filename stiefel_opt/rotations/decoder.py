"""Modules of a Llama-like decoder that rotations act on, looked up by name and checked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stiefel_opt.errors import check_module, fail, type_name
from stiefel_opt.numerics.distributed import is_sharded

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MARK = "stiefel_rotations"  # in the model's config: what was done to it
OWN = "_stiefel_config"  # of a model: the config that it shares with no other
NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
LINEARS = [f"{part}.{leaf}" for part, leaves in PROJECTIONS.items() for leaf in leaves]
HARMLESS = {"q_norm", "k_norm", "rotary_emb", "act_fn", "rotary_fn"}  # nothing that is rotated
LOOKED_FOR = (
    "model.embed_tokens, model.layers, model.norm and lm_head, and in every layer input_layernorm, "
    "self_attn (q_proj, k_proj, v_proj, o_proj), post_attention_layernorm and mlp (gate_proj, "
    "up_proj, down_proj)"
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One block of the decoder."""

    name: str
    module: nn.Module
    input_norm: nn.Module
    attention: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    middle_norm: nn.Module
    mlp: nn.Module
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def linears(self) -> Iterator[tuple[str, nn.Linear]]:
        """Give name and module of every linear layer."""
        modules = (self.query, self.key, self.value, self.output, self.gate, self.up, self.down)
        for leaf, module in zip(LINEARS, modules, strict=True):
            yield f"{self.name}.{leaf}", module


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model, its parts, and the sizes of its rotations."""

    model: nn.Module
    embedding: nn.Embedding
    layers: tuple[Layer, ...]
    norm: nn.Module
    head: nn.Linear
    width: int
    head_size: int

    def norms(self) -> Iterator[tuple[str, nn.Module, tuple[nn.Linear, ...]]]:
        """Give every RMSNorm of the stream by name, with the linear layers that read it."""
        for layer in self.layers:
            before, middle = (f"{layer.name}.{leaf}" for leaf in NORMS)
            yield before, layer.input_norm, (layer.query, layer.key, layer.value)
            yield middle, layer.middle_norm, (layer.gate, layer.up)
        yield "model.norm", self.norm, (self.head,)


def read_decoder(model: object, *, quantised: bool = False) -> Decoder:
    """Return the parts of a Llama-like decoder; raise for other models, naming the missing module.

    With ``quantised``, linear layers may be of any class, and weights are not checked.
    """
    given = model.module if isinstance(model, DistributedDataParallel) else model
    model = check_module("model", given)
    known = dict(model.named_modules(remove_duplicate=False))

    def find(name: str, kind: Any) -> Any:
        module = known.get(name)
        if module is None:
            owner = f"a {type(model).__name__} without {name}"
            raise ValueError(fail("model", f"be a Llama-like decoder with {LOOKED_FOR}", owner))
        if not isinstance(module, kind):
            remedy = (
                "load the model in float32 or bfloat16, without quantisation, and merge adapters"
            )
            raise TypeError(fail(name, f"be a torch {kind.__name__}", type_name(module), remedy))
        return module

    def only(name: str, children: set[str]) -> None:
        more = sorted(child for child, _ in known[name].named_children() if child not in children)
        if more:
            wanted = f"have no modules but {', '.join(sorted(children - HARMLESS))}"
            remedy = "only Llama, Mistral, Qwen2, Qwen3 and models built like them can be rotated"
            raise ValueError(fail(name or "the model", wanted, ", ".join(more), remedy))

    linear: Any = nn.Module if quantised else nn.Linear
    embedding, head = find("model.embed_tokens", nn.Embedding), find("lm_head", linear)
    norm, blocks = find("model.norm", nn.Module), find("model.layers", nn.ModuleList)
    only("", {"model", "lm_head"})
    only("model", {"embed_tokens", "layers", "norm", *HARMLESS})
    layers = []
    for number in range(len(blocks)):
        name = f"model.layers.{number}"
        q, k, v, o, gate, up, down = (find(f"{name}.{leaf}", linear) for leaf in LINEARS)
        norms = [find(f"{name}.{leaf}", nn.Module) for leaf in NORMS]
        attention, mlp = known[f"{name}.self_attn"], known[f"{name}.mlp"]
        only(name, {*NORMS, *PROJECTIONS})
        for part, leaves in PROJECTIONS.items():
            only(f"{name}.{part}", {*leaves, *HARMLESS})
        layers.append(
            Layer(name, known[name], norms[0], attention, q, k, v, o, norms[1], mlp, gate, up, down)
        )
    if not layers:
        raise ValueError(fail("model.layers", "hold at least one layer", "none"))
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    inner = getattr(layers[0].output, "in_features", 0)
    size = getattr(layers[0].attention, "head_dim", None) or (inner // heads if heads else 0)
    decoder = Decoder(model, embedding, tuple(layers), norm, head, embedding.embedding_dim, size)
    if not quantised:
        _check_weights(decoder)
    return decoder


def _check_weights(decoder: Decoder) -> None:
    """Raise unless all weights are plain floating-point tensors, sharded or not, and of heads."""
    remedy = "load the checkpoint before it was quantised"
    linears = [pair for layer in decoder.layers for pair in layer.linears()]
    for name, linear in [("lm_head", decoder.head), *linears]:
        weight = linear.weight
        plain = type(weight.data) is Tensor or is_sharded(weight)
        if not plain or not weight.is_floating_point() or weight.element_size() < 2:
            kind = f"a {type(weight.data).__name__} of {weight.dtype}"
            raise TypeError(fail(f"{name}.weight", "not be quantised", kind, remedy))
    method, size = quantization_of(decoder.model), decoder.head_size
    if method not in (None, "gguf"):  # transformers unpacks gguf into plain tensors
        given = f"config.quantization_config of {method}"
        raise TypeError(fail("model", "not be quantised", given, remedy))
    for layer in decoder.layers:
        for leaf, features in (
            ("q_proj", layer.query.out_features),
            ("v_proj", layer.value.out_features),
            ("o_proj", layer.output.in_features),
        ):
            if not size or features % size:
                wanted = f"have features that are heads of {size}"
                raise ValueError(fail(f"{layer.name}.self_attn.{leaf}", wanted, features))


def check_sharing(decoder: Decoder) -> None:
    """Raise where a parameter has two owners, but for the head that is tied to the embedding."""
    owners: dict[int, list[str]] = {}
    for name, parameter in decoder.model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        if len(names) > 1 and set(names) != {EMBEDDING, HEAD}:
            first, *others = names
            remedy = "give each of them a weight of its own"
            given = f"shared with {', '.join(others)}"
            raise ValueError(fail(first, "not be shared", given, remedy))


def quantization_of(model: nn.Module) -> str | None:
    """The method by which the checkpoint was quantised, from the config."""
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    return str(getattr(method, "value", method))


# ---- what was done to a model --------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """What the config says of an earlier call: empty, or "state" and "online"."""
    return getattr(getattr(model, "config", None), MARK, None) or {}


def mark(model: nn.Module, state: str, online: tuple[str, ...] = ()) -> None:
    """Write into the config what was done; ``save_pretrained`` keeps it."""
    config = own_config(model)
    if config is not None:
        setattr(config, MARK, {"state": state, "online": list(online)})


def own_config(model: nn.Module) -> Any:
    """Return the config of ``model``, which no other model shares from now on.

    transformers keeps the object it is given, in every module: a second model may be made from it.
    """
    shared = getattr(model, "config", None)
    if shared is None or model.__dict__.get(OWN) is shared:
        return shared
    own = copy.deepcopy(shared)
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            module.config = own
    model.__dict__[OWN] = own
    return own


def whole(name: str, weight: Tensor) -> Tensor:
    """Return ``weight`` unless it is sharded."""
    if is_sharded(weight):
        remedy = "change the model before fully_shard"
        raise TypeError(fail(f"{name}.weight", "not be sharded", "a DTensor", remedy))
    if weight.is_meta:
        raise ValueError(fail(f"{name}.weight", "have values", "a tensor on the meta device"))
    return weight


def rows(weight: Tensor, numbers: int = 1 << 24) -> Iterator[Tensor]:
    """Give ``weight`` in pieces of rows, so that a float64 copy of a piece is small."""
    return iter(torch.split(weight, max(1, numbers // weight.size(-1))))
