"""Constrain every matrix of the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from typing_extensions import override

from stiefel_opt.errors import check_flag, check_module, fail
from stiefel_opt.tags import Stiefel, table
from stiefel_opt.tools.attention import (
    Found,
    Names,
    constrain_found,
    found_of,
    is_conv1d,
    listed,
    plans_of,
    remedy_for,
)


@dataclass(frozen=True)
class TransformerReport:
    """Result of :func:`constrain_transformer`; printing it shows a table.

    Attributes:
        lines: ``(parameter, class of the module, reading in words, how far it moved)`` for each
            constrained weight.
        skipped: ``(module, reason)`` for each module of a block that is unchanged.
    """

    lines: tuple[tuple[str, str, str, str], ...]
    skipped: tuple[tuple[str, str], ...]

    @override
    def __str__(self) -> str:
        text = table([("parameter", "module", "reading", "moved"), *self.lines])
        return text + ("\nnot constrained:\n" + listed(self.skipped) if self.skipped else "")


def constrain_transformer(
    model: nn.Module,
    *,
    scale: float | Literal["keep", "rms"] = 1.0,
    learn_scale: bool = False,
    names: Mapping[str, str] | None = None,
) -> TransformerReport:
    """Put every matrix of the blocks of a transformer on the manifold.

    Queries, keys, values and the columns of the output projection are one matrix for each head, as
    by :func:`constrain_attention` "within"; each linear layer of a feed-forward part is one, and
    two where it holds a gate beside what is gated. Embeddings, norms, biases, other parts of
    attention such as relative positions, convolutions, experts in one tensor and all that lies
    outside of the blocks, such as the last head, stay unconstrained.

    A block is the repeated part of the model around an attention module, of torch
    (``nn.TransformerEncoder``, ``nn.TransformerDecoder``), timm, transformers (encoders and
    decoders) and others; see :func:`constrain_attention` for how attention is recognised.

    Args:
        model: A model, or one block.
        scale, learn_scale: As in :func:`stiefel_opt.constrain`, for all weights.
        names: As in :func:`constrain_attention`.

    Returns: The constrained weights, and the modules of blocks that are unchanged.
    Raises:
        ValueError: if no attention module can be read; it lists the modules. Nothing is changed
            then.
        TypeError: for weights of a dtype that :func:`stiefel_opt.constrain` refuses, and ``names``
            that are no dict of strings.

    Note: Values become the nearest point, as by :func:`stiefel_opt.constrain`, with a warning of
        weights that look trained. The report says how far each moved as a part of its length.
    """
    check_module("model", model)
    check_flag("learn_scale", learn_scale)
    planned, paths, skipped = _attention(model, Names.of(names))
    found: dict[int, Found] = {}  # of tied weights the first one
    for each in (*planned, *_others(model, planned, paths, skipped)):
        found.setdefault(id(model.get_parameter(each[0])), each)
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    in_order = sorted(found.values(), key=lambda each: order.get(each[0], 0))
    lines = constrain_found(model, in_order, scale, learn_scale)
    return TransformerReport(lines, tuple(skipped.items()))


def _attention(model: nn.Module, names: Names) -> tuple[list[Found], list[str], dict[str, str]]:
    """Return the weights of attention modules, their paths, and why others cannot be read."""
    plans, skipped = plans_of(model, "within", "qkvo", names)
    if skipped:  # without the output projection perhaps
        more, _ = plans_of(model, "within", "qkv", names)
        for path in skipped.keys() & more.keys():
            plans[path] = more[path]
            del skipped[path]
    if not plans:
        wanted = "contain an attention module that can be read"
        remedy = remedy_for(model, skipped, names.layouts)
        raise ValueError(fail("model", wanted, f"a {type(model).__name__}", remedy))
    return found_of(model, plans), list(plans), skipped


def _others(
    model: nn.Module, planned: list[Found], paths: list[str], skipped: dict[str, str]
) -> Iterator[Found]:
    """Yield the weights of all other linear layers of the blocks, and note what is left out.

    That is a layer without a plain weight, a layer of an attention module that is no projection,
    such as one of relative positions, and weights that are no matrices, such as experts.
    """
    taken = {name for name, _, _ in planned}
    owners = [name.rpartition(".")[0] for name, _, _ in planned]
    unread = tuple(skipped)
    blocks = dict.fromkeys(_block_of(model, path) for path in (*owners, *unread))
    attention = [path for path in paths if path not in blocks]
    for block in blocks:
        if block is None:
            continue
        for inner, layer in model.get_submodule(block).named_modules():
            path = _joined(block, inner)
            kind = type(layer).__name__
            if _is_within(path, unread) or _joined(path, "weight") in taken:
                continue
            if not (isinstance(layer, nn.Linear) or is_conv1d(layer)):
                shapes = [own.shape for own in layer.parameters(recurse=False)]
                if any(sum(size > 1 for size in shape) > 2 for shape in shapes):
                    skipped[path] = f"{kind}: its weights are no matrices"
                continue
            if _is_within(path, attention):
                skipped[path] = f"{kind}: no projection of its attention module"
                continue
            weight = layer._parameters.get("weight")
            if weight is None or weight.ndim != 2:
                skipped[path] = f"{kind}: its weight is computed, or no matrix"
                continue
            taken.add(_joined(path, "weight"))
            above = model.get_submodule(path.rpartition(".")[0])
            heads = 2 if _is_gated(above, layer) else None
            yield (
                _joined(path, "weight"),
                type(above).__name__,
                Stiefel(heads, transposed=is_conv1d(layer)),
            )


def _is_within(path: str, modules: Iterable[str]) -> bool:
    """Say whether a path is that of one of these modules or of a part of one."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def _block_of(model: nn.Module, path: str) -> str | None:
    """Return the path of the repeated part of a model around one of its modules, or None.

    That is the innermost member of a list of modules of one class; in T5 a member is a list of
    layers of several classes. A model that is called a layer or a block is one.
    """
    parts = path.split(".")
    block = None
    for length in range(len(parts) - 1, 0, -1):
        if parts[length - 1].isdigit():
            block = ".".join(parts[:length])
            container = model.get_submodule(".".join(parts[: length - 1]))
            if len({type(each) for each in container.children()}) == 1:
                return block
    is_block = any(word in type(model).__name__.lower() for word in ("layer", "block"))
    return "" if block is None and is_block else block


def _is_gated(above: nn.Module, layer: nn.Module) -> bool:
    """Say whether a layer returns a gate beside what is gated: another one takes half of it."""
    size = _sizes(layer)[1]
    inputs = [_sizes(other)[0] for other in above.children() if other is not layer]
    return size not in inputs and size % 2 == 0 and size // 2 in inputs


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Return how many features a linear layer takes and returns; 0 for other modules."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.ndim != 2 or not (isinstance(layer, nn.Linear) or is_conv1d(layer)):
        return 0, 0
    row_count, column_count = weight.shape
    return (row_count, column_count) if is_conv1d(layer) else (column_count, row_count)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
