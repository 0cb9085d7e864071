"""Modules of a decoder that rotations act on, looked up by name and checked."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stiefel_opt.errors import check_module, classes_of, fail, type_name
from stiefel_opt.numerics import is_sharded
from stiefel_opt.rotations.description import FAMILIES, LLAMA, Description, from_dict

MARK = "stiefel_rotations"  # in the model's config: what was done to it
CALL = "call_load_online_"  # how the notes of online rotations end
OWN = "_stiefel_config"  # of a model: the config that it shares with no other
HARMLESS = {"q_norm", "k_norm", "rotary_emb", "act_fn", "rotary_fn"}  # nothing that is rotated
CHILDREN = {  # of Llama's modules
    "": {"model", "lm_head"},
    "model": {"embed_tokens", "layers", "norm", *HARMLESS},
    "model.layers.N": {*LLAMA.norms, "self_attn", "mlp"},
    "model.layers.N.self_attn": {"q_proj", "k_proj", "v_proj", "o_proj", *HARMLESS},
    "model.layers.N.mlp": {"gate_proj", "up_proj", "down_proj", *HARMLESS},
}
LOOKED_FOR = (
    "model.embed_tokens, model.layers, model.norm and lm_head, and in every layer input_layernorm, "
    "self_attn (q_proj, k_proj, v_proj, o_proj), post_attention_layernorm and mlp (gate_proj, "
    "up_proj, down_proj)"
)
UNQUANTISED = "load the model in float32 or bfloat16, without quantisation, and merge adapters"


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear layer, or the parameter of a layer's experts, by its owner."""

    name: str
    owner: nn.Module
    leaf: str

    @property
    def module(self) -> Any:
        """The module, or the parameter: what stands in its place at present."""
        return getattr(self.owner, self.leaf)

    @property
    def is_parameter(self) -> bool:
        """Whether there is no module, as with experts whose weights are one parameter."""
        return isinstance(self.module, nn.Parameter)

    @property
    def parameter(self) -> Tensor:
        found: Tensor = self.module if self.is_parameter else self.module.weight
        return found

    @property
    def weight_name(self) -> str:
        return self.name if self.is_parameter else f"{self.name}.weight"

    @property
    def bias(self) -> Tensor | None:
        return None if self.is_parameter else self.module.bias

    @property
    def weight(self) -> Tensor:
        """The weight as ``(..., outputs, inputs)``; transformers' Conv1D has it transposed."""
        return self.parameter.mT if type(self.module).__name__ == "Conv1D" else self.parameter


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of the stream, with the layers that read it."""

    name: str
    module: nn.Module
    readers: tuple[Linear, ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One block of the decoder."""

    name: str
    module: nn.Module
    norms: tuple[Norm, ...]
    writers: tuple[Linear, ...]
    value: Linear | None
    output: Linear | None  # the writer that reads the heads
    down: Linear | None  # the writer whose input R4 turns

    @property
    def attention(self) -> nn.Module:
        """The module that attends: it owns the first writer."""
        return (self.output or self.writers[0]).owner

    def linears(self) -> Iterator[Linear]:
        """Give every reader and writer of the stream."""
        for norm in self.norms:
            yield from norm.readers
        yield from self.writers


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model, its parts, and the sizes of its rotations."""

    model: nn.Module
    description: Description
    embeddings: tuple[tuple[str, nn.Embedding], ...]
    layers: tuple[Layer, ...]
    final: Norm
    width: int
    head_size: int

    @property
    def head(self) -> Any:
        """The layer of logits."""
        return self.final.readers[0].module

    @property
    def device(self) -> torch.device:
        return self.embeddings[0][1].weight.device

    @property
    def has_heads(self) -> bool:
        """Whether R2 can be folded: values have a layer of their own."""
        return self.description.values is not None

    def linears(self) -> Iterator[Linear]:
        """Give every reader and writer of the stream, the head first."""
        yield self.final.readers[0]
        for layer in self.layers:
            yield from layer.linears()

    def norms(self) -> Iterator[Norm]:
        """Give every norm of the stream."""
        for layer in self.layers:
            yield from layer.norms
        yield self.final


def read_decoder(
    model: object, *, description: Description | None = None, quantised: bool = False
) -> Decoder:
    """Return the parts of a decoder; raise for other models, naming the missing module.

    What they are called comes from ``description``, the config of a model that was prepared with
    one, the table of families, or else from Llama; only then is every module looked at. With
    ``quantised``, linear layers may be of any class, and weights are not checked. Of a
    ``PeftModel`` the model inside is read.
    """
    given: Any = model.module if isinstance(model, DistributedDataParallel) else model
    if "PeftModel" in classes_of(given, "peft"):
        given = given.get_base_model()
    check_module("model", given)
    module: nn.Module = given
    kept = state_of(module).get("description")
    known = FAMILIES.get(getattr(getattr(module, "config", None), "model_type", ""))
    names = description or (from_dict(kept) if kept else known)
    reader = _Reader(module, names or LLAMA, quantised)
    if names is None:
        reader.check_children()
    decoder = reader.read()
    if not quantised:
        _check_weights(decoder)
    return decoder


class _Reader:
    """Looks up the names of a description in a model."""

    def __init__(self, model: nn.Module, names: Description, quantised: bool) -> None:
        self.model, self.names, self.quantised = model, names, quantised
        self.known = dict(model.named_modules(remove_duplicate=False))
        self.found: set[str] = set()  # names within a block that some block has

    def read(self) -> Decoder:
        names = self.names
        embeddings = tuple((name, self.find(name, nn.Embedding)) for name in names.embeddings)
        head = self.linear(names.head)
        final = Norm(names.final, self.find(names.final, nn.Module), (head,))
        blocks = self.find(names.layers, nn.ModuleList)
        layers = tuple(self.block(f"{names.layers}.{i}") for i in range(len(blocks)))
        if not layers:
            raise ValueError(fail(names.layers, "hold at least one layer", "none"))
        wanted = {*names.norms, *names.writers}.union(*names.norms.values())
        if names is not LLAMA and names not in FAMILIES.values() and wanted - self.found:
            absent = ", ".join(sorted(wanted - self.found))
            raise ValueError(fail("description", "name modules of the model", absent))
        width = embeddings[0][1].embedding_dim
        return Decoder(self.model, names, embeddings, layers, final, width, self.head_size(layers))

    def find(self, name: str, kind: Any) -> Any:
        module = self.known.get(name)
        if module is None:
            wanted = f"be a Llama-like decoder with {LOOKED_FOR}"
            if self.names is not LLAMA:
                wanted = f"have the module {name}"
            owner = f"a {type(self.model).__name__} without {name}"
            remedy = "or pass prepare_ a description from rotations.describe"
            raise ValueError(fail("model", wanted, owner, remedy))
        if not isinstance(module, kind):
            wanted = f"be a torch {kind.__name__}"
            raise TypeError(fail(name, wanted, type_name(module), UNQUANTISED))
        return module

    def linear(self, name: str) -> Linear:
        """A linear layer that the model must have."""
        module = self.find(name, nn.Module)
        weight = getattr(module, "weight", None)  # Conv1D and routers have one, too
        is_matrix = isinstance(weight, nn.Parameter) and weight.ndim == 2
        is_linear = isinstance(module, nn.Linear) or (self.names is not LLAMA and is_matrix)
        if not self.quantised and not is_linear:
            raise TypeError(fail(name, "be a torch Linear", type_name(module), UNQUANTISED))
        owner, _, leaf = name.rpartition(".")
        return Linear(name, self.known[owner], leaf)

    def optional(self, block: str, name: str) -> Linear | None:
        """A linear layer, or a parameter, that a block may lack; Llama's may not."""
        full = f"{block}.{name}"
        owner, _, leaf = full.rpartition(".")
        if full in self.known or self.names is LLAMA:
            self.found.add(name)
            return self.linear(full)
        if isinstance(getattr(self.known.get(owner), leaf, None), nn.Parameter):
            self.found.add(name)
            return Linear(full, self.known[owner], leaf)
        return None

    def block(self, name: str) -> Layer:
        names, norms = self.names, []
        if names in FAMILIES.values() and names.refusal is None:
            self.check_norms(name)
        for leaf, readers in names.norms.items():
            full = f"{name}.{leaf}"
            if full not in self.known and names is not LLAMA:
                continue
            self.found.add(leaf)
            there = (self.optional(name, reader) for reader in readers)
            read = tuple(reader for reader in there if reader is not None)
            norms.append(Norm(full, self.find(full, nn.Module), read))
        writers = {leaf: self.optional(name, leaf) for leaf in names.writers}
        present = tuple(writer for writer in writers.values() if writer is not None)
        if not norms or not present:
            raise ValueError(fail(name, "have a norm and a writer of the description", "none"))
        value = None if names.values is None else self.linear(f"{name}.{names.values}")
        output, down = (writers.get(leaf or "") for leaf in (names.output, names.down))
        return Layer(name, self.known[name], tuple(norms), present, value, output, down)

    def check_norms(self, name: str) -> None:
        """Raise unless a block has the norms of its family: some have variants with others."""
        children = self.known[name].named_children()
        found = {leaf for leaf, child in children if "Norm" in type(child).__name__}
        if found != set(self.names.norms):
            wanted = f"have the norms {', '.join(self.names.norms)} of its family and no other"
            remedy = "describe the model by rotations.describe"
            raise ValueError(fail(name, wanted, ", ".join(sorted(found)) or "none", remedy))

    def head_size(self, layers: tuple[Layer, ...]) -> int:
        """From the attention or the config; 0 where neither tells it."""
        config = getattr(self.model, "config", None)
        heads = getattr(config, "num_attention_heads", None)
        size = getattr(layers[0].attention, "head_dim", None) or getattr(config, "head_dim", None)
        inner = getattr(layers[0].output and layers[0].output.module, "in_features", 0)
        return int(size or (inner // heads if heads else 0))

    def check_children(self) -> None:
        """Raise for modules that Llama has not: what they do to the stream is not known."""
        for name, owner in self.known.items():
            children = CHILDREN.get(re.sub(r"\.\d+", ".N", name))
            present = {child for child, _ in owner.named_children()}
            if children is None or present <= children or not (name or children <= present):
                continue  # where `model` is missing, `find` says so
            more = present - children
            wanted = f"have no modules but {', '.join(sorted(children - HARMLESS))}"
            remedy = (
                "pass prepare_ a description from rotations.describe: Llama, Mistral, Qwen2, Qwen3 "
                f"and models built like them need none, nor do {', '.join(sorted(FAMILIES))}"
            )
            raise ValueError(fail(name or "the model", wanted, ", ".join(sorted(more)), remedy))


def _check_weights(decoder: Decoder) -> None:
    """Raise unless all weights are plain floating-point tensors, sharded or not, and fit."""
    remedy = "load the checkpoint before it was quantised"
    writers = {writer for layer in decoder.layers for writer in layer.writers}
    for norm in decoder.norms():
        for linear in norm.readers:
            _check_size(linear, "inputs", linear.weight.size(-1), decoder.width)
    for writer in writers:
        _check_size(writer, "outputs", writer.weight.size(-2), decoder.width)
    for linear in decoder.linears():
        weight = linear.parameter
        plain = type(weight.data) is Tensor or is_sharded(weight)
        if not plain or not weight.is_floating_point() or weight.element_size() < 2:
            kind = f"a {type(weight.data).__name__} of {weight.dtype}"
            raise TypeError(fail(linear.weight_name, "not be quantised", kind, remedy))
    method, size = quantization_of(decoder.model), decoder.head_size
    if method not in (None, "gguf"):  # transformers unpacks gguf into plain tensors
        given = f"config.quantization_config of {method}"
        raise TypeError(fail("model", "not be quantised", given, remedy))
    for layer in decoder.layers if decoder.has_heads else ():
        for side, part in ((-2, layer.value), (-1, layer.output)):
            features = 0 if part is None else part.weight.size(side)
            if part is not None and (not size or features % size):
                wanted = f"have features that are heads of {size}"
                raise ValueError(fail(part.name, wanted, features))


def _check_size(linear: Linear, what: str, size: int, width: int) -> None:
    if size != width:
        raise ValueError(fail(linear.name, f"have {width} {what}, as wide as the stream", size))


def check_sharing(decoder: Decoder) -> None:
    """Raise where a parameter has two owners, but for the head that is tied to the embedding."""
    owners: dict[int, list[str]] = {}
    for name, parameter in decoder.model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    names = decoder.description
    tied = {f"{names.embeddings[0]}.weight", f"{names.head}.weight"}
    for shared in owners.values():
        if len(shared) > 1 and set(shared) != tied:
            first, *others = shared
            remedy = "give each of them a weight of its own"
            given = f"shared with {', '.join(others)}"
            raise ValueError(fail(first, "not be shared", given, remedy))


def quantization_of(model: nn.Module) -> str | None:
    """The method by which the checkpoint was quantised, from the config."""
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    name = str(getattr(method, "value", method))
    return None if name.endswith(CALL) else name


# ---- what was done to a model --------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """What the config says of an earlier call: empty, or "state" and "online"."""
    return getattr(getattr(model, "config", None), MARK, None) or {}


def mark(
    model: nn.Module,
    state: str,
    online: tuple[str, ...] = (),
    description: Description | None = None,
) -> None:
    """Write into the config what was done; ``save_pretrained`` keeps it."""
    config, kept = own_config(model), state_of(model).get("description")
    content: dict[str, Any] = {"state": state, "online": list(online)}
    if description is not None or kept:
        content["description"] = kept if description is None else description.as_dict()
    if config is not None:
        setattr(config, MARK, content)


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


def require_values(name: str, weight: Tensor) -> Tensor:
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
