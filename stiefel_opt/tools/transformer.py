"""Constrain every matrix of the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from torch import nn
from typing_extensions import override

from stiefel_opt.errors import check_flag, check_module
from stiefel_opt.tags import Stiefel
from stiefel_opt.tools.attention import (
    Found,
    constrain_found,
    found_of,
    is_within,
    plans_of,
    shown,
)
from stiefel_opt.tools.projections import EVERYTHING, Names, is_conv1d, is_linear, joined

_BLOCKS: Final = ("layer", "block")  # what the name of the class of a block ends with


@dataclass(frozen=True)
class TransformerReport:
    """Result of :func:`constrain_transformer`; printing it shows a table.

    Attributes:
        lines: ``(parameter, class of the module, reading in words, how far it moved)`` for each
            constrained weight.
        skipped: ``(module or parameter, reason)`` for what is unchanged in a block.
    """

    lines: tuple[tuple[str, str, str, str], ...]
    skipped: tuple[tuple[str, str], ...]

    @override
    def __str__(self) -> str:
        return shown(self.lines, self.skipped)


def constrain_transformer(
    model: nn.Module,
    *,
    scale: float | Literal["keep", "rms"] = 1.0,
    learn_scale: bool = False,
    names: Mapping[str, str] | None = None,
) -> TransformerReport:
    """Put every matrix of the blocks of a transformer on the manifold.

    Queries, keys, values and the columns of the output projection are one matrix for each head, as
    by :func:`constrain_attention` "within"; each other linear layer, router and expert is one, and
    two where it holds a gate beside what is gated: the matrices that the model would have if no
    weights were fused. Embeddings, norms, biases and all that lies outside of the blocks, such as
    the last head, stay unconstrained; so do, by name in the report, other linear layers of an
    attention module, convolutions and what is beside one over time, as in Mamba, and experts that
    hold gate and value in turn.

    A block is a member of a list of modules that holds an attention module: in models of torch
    (``nn.TransformerEncoder``, ``nn.TransformerDecoder``), timm, transformers (encoders and
    decoders) and others; outside of a list, a module of a class whose name ends with Layer or
    Block. See :func:`constrain_attention` for how attention is recognised.

    Args:
        model: A model, or one block.
        scale, learn_scale: As in :func:`stiefel_opt.constrain`, for all weights.
        names: As in :func:`constrain_attention`.

    Returns: The constrained weights, and what is unchanged in the blocks.
    Raises:
        ValueError: if no attention module can be read; it lists the modules. For ``scale="rms"``
            and a weight whose matrices have several heights, as in DeepSeek. Nothing is changed
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
    plans, skipped = plans_of(model, "within", EVERYTHING, names)
    if skipped:  # without the output projection perhaps
        more, _ = plans_of(model, "within", EVERYTHING.replace("o", ""), names)
        for path in skipped.keys() & more.keys():
            plans[path] = more[path]
            del skipped[path]
    found = found_of(model, plans, skipped, names)
    for path in list(skipped):  # the output of one that was read
        if any(is_within(name, path) for name, _, _ in found):
            del skipped[path]
    return found, list(plans), skipped


def _others(
    model: nn.Module, planned: list[Found], paths: list[str], skipped: dict[str, str]
) -> Iterator[Found]:
    """Yield the weights of all other linear layers and experts of the blocks, by name.

    Noted is what stays: a layer of an attention module that is no projection, such as one of
    relative positions, one beside a convolution over time, as in Mamba, whose rows may be several
    matrices, and what is no linear layer.
    """
    taken = {name for name, _, _ in planned}
    blocks = dict.fromkeys(b for path in (*paths, *skipped) for b in _blocks(model, path))
    parts: dict[nn.Module, str] = {}
    for block in blocks:
        for inner, layer in model.get_submodule(block).named_modules():
            parts.setdefault(layer, joined(block, inner))
    for layer, path in parts.items():
        if any(is_within(path, other) for other in skipped):
            continue
        above = model.get_submodule(path.rpartition(".")[0])
        kind = type(layer).__name__
        if is_linear(layer):
            if (name := joined(path, "weight")) in taken:
                continue
            beside = [each for each in above.children() if each is not layer]
            others = [_sizes(each) for each in beside if is_linear(each)]
            is_gated = _is_gated(_sizes(layer), others)
            is_alone = len(others) == 1 and (is_gated or _sizes(layer)[1] == others[0][0])
            if any(is_within(path, attention) for attention in paths):
                skipped[path] = f"{kind}: no projection of its attention module"
            elif any(_is_over_time(each) for each in beside) and not is_alone:
                skipped[path] = f"{kind}: beside a convolution over time, perhaps several matrices"
            else:
                reading = Stiefel(2 if is_gated else None, transposed=is_conv1d(layer))
                yield name, type(above).__name__, reading
        elif isinstance(layer, nn.Linear):
            skipped[path] = f"{kind}: its weight is computed, or no matrix"
        elif not isinstance(layer, nn.Embedding) and "norm" not in kind.lower():
            for leaf, parameter in layer.named_parameters(recurse=False):
                name = joined(path, leaf)
                if sum(size > 1 for size in parameter.shape) < 2 or "bias" in leaf or name in taken:
                    continue
                of_experts = _of_experts(layer, leaf, above) if "expert" in kind.lower() else None
                if of_experts is not None:
                    yield name, kind, of_experts
                else:
                    skipped[path if leaf == "weight" else name] = f"{kind}: no linear layer"


def _blocks(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the blocks: of the members of the list that holds this module.

    That is the innermost list of modules of one class; in T5 a member of it is a list of layers of
    several classes. Without one it is the outermost list; in XLM, where attention modules are a
    list, all lists of that length. Without a list it is the innermost layer or block by name.
    """
    parts = path.split(".")
    blocks: list[str] = []
    for length in range(len(parts) - 1, 0, -1):
        if parts[length - 1].isdigit():
            above = ".".join(parts[: length - 1])
            members = dict(model.get_submodule(above).named_children())
            is_list = isinstance(model.get_submodule(above), nn.ModuleList)
            is_alike = len({type(each) for each in members.values()}) == 1
            blocks = [joined(above, name) for name in members]
            if not (is_list or is_alike):
                blocks = [".".join(parts[:length])]
            if is_alike:
                return blocks
    if not blocks and parts[-1].isdigit():
        owner, lists = ".".join(parts[:-2]), dict[str, nn.ModuleList]()
        for name, child in model.get_submodule(owner).named_children():
            if isinstance(child, nn.ModuleList):
                lists[joined(owner, name)] = child
        count = len(lists.get(".".join(parts[:-1]), ()))
        same = [(name, each) for name, each in lists.items() if len(each) == count]
        blocks = [f"{name}.{place}" for name, each in same for place in range(len(each))]
    if blocks:
        return blocks
    holders = [".".join(parts[:length]) for length in range(len(parts))]
    classes = [type(model.get_submodule(each)).__name__.lower() for each in holders]
    named = [
        each
        for each, kind in zip(holders, classes, strict=True)
        if kind.rstrip("0123456789v").endswith(_BLOCKS)
    ]
    return named[-1:]


def _is_over_time(layer: nn.Module) -> bool:
    """Say whether each channel has a filter of its own, as beside the layers of a recurrence."""
    weights = [each.shape for each in layer.parameters(recurse=False) if each.ndim == 3]
    return any(size == 1 < length for _, size, length in weights)


def _of_experts(layer: nn.Module, leaf: str, above: nn.Module) -> Stiefel | None:
    """Return how the weight of all experts, (experts, out, in) or (experts, in, out), is read.

    None where it holds a gate and what is gated in turn.
    """
    weight = layer.get_parameter(leaf)
    owners = [layer] if sum(each.ndim == 3 for each in layer.parameters()) > 1 else above.children()
    sizes = [
        each.shape[1:]
        for owner in owners
        for each in owner.parameters(recurse=False)
        if each.ndim == 3 and each is not weight
    ]
    if weight.ndim != 3:
        return None
    for transposed in (False, True):
        own, *others = [size[:: 1 if transposed else -1] for size in (weight.shape[1:], *sizes)]
        if _is_gated(own, others):
            is_mixed = getattr(layer, "is_concatenated", True) is False
            return None if is_mixed else Stiefel(2, transposed=transposed)
    return Stiefel()


def _is_gated(own: Sequence[int], others: Iterable[Sequence[int]]) -> bool:
    """Say whether a layer of (in, out) features returns a gate beside what is gated.

    Another one takes half of it.
    """
    inputs = [taken for taken, _ in others]
    return own[1] not in inputs and own[1] % 2 == 0 and own[1] // 2 in inputs


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Return how many features a linear layer takes and returns."""
    row_count, column_count = layer.get_parameter("weight").shape
    return (row_count, column_count) if is_conv1d(layer) else (column_count, row_count)
