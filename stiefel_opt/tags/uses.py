"""Warnings of constraints that do not suit a weight: of tables, heads, fused projections."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from torch import Tensor, nn

from stiefel_opt.errors import fail, users_level
from stiefel_opt.tags.layers import is_layer
from stiefel_opt.tags.manifold import HIDDEN, Stiefel

TABLES: Final = (nn.Embedding, nn.EmbeddingBag)

_QKV: Final = re.compile(r"q_?k_?v|k_?q_?v|query_?key_?value|w_pack")
_MAYBE_QKV: Final = re.compile(r"c_attn|in_proj|att_proj")  # if the shape agrees
_PAIRS: Final = {
    "keys and values": re.compile(r"kv(?!_a)|key_?value"),
    "gates and values": re.compile(r"gate_?up|up_?gate"),
}
_HEADS: Final = re.compile(
    r"(lm_?)?heads?(_\w+)?|classifier|embed_out|fc_out|generator|logits|out(put)?(_layer|_projection)?|"
    r"score|to_logits|unembed(ding)?|vocab\w*"
)
_TOKENS: Final = re.compile(
    r"(^|_)(pos(ition)?s?|tokens?|cls|embed(ding)?s?|prompts?|registers?)(_|$)"
)
_RATIO: Final = 8  # of rows to columns, from which on a head gives short rows: a third at most
_WIDTH: Final = 32  # of the input of a head; the rank of an adapter is less
_VOCABULARY: Final = 4096  # entries at least, of a layer by itself


def check_uses(
    module: nn.Module, asked: Mapping[str, Stiefel], *, is_said: bool, is_chosen: bool
) -> None:
    """Check every parameter once; with ``is_chosen``, by a pattern or function, tokens as well."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    for name, reading in asked.items():
        if id(parameters[name]) not in seen:  # tied
            check_use(module, name, parameters[name], reading, is_said=is_said)
        seen.add(id(parameters[name]))
    if is_chosen:
        owners = ((name, module.get_submodule(name.rpartition(".")[0])) for name in asked)
        warn_of_tokens(module, ((name, owner, parameters[name]) for name, owner in owners))


def warn_of_batches(module: nn.Module, asked: Mapping[str, Stiefel]) -> None:
    """Warn of tensors of several dimensions that are read as a batch by default."""
    shapes = {name: module.get_parameter(name).shape for name in asked}
    found = ((name, shapes[name], reading) for name, reading in asked.items())
    for text, (name, *others) in unsaid_batches(module, found).items():
        more = f" and {len(others)} more are each" if others else " is"
        warnings.warn(
            f"`{name}`{more} read as {text}, or flatten=True for a kernel; flatten=False says that "
            "they are a batch",
            stacklevel=users_level(),
        )


def unsaid_batches(
    module: nn.Module, weights: Iterable[tuple[str, tuple[int, ...], Stiefel]]
) -> dict[str, list[str]]:
    """Return what to do about batches that were not asked for, and the names of each kind."""
    found: dict[str, list[str]] = {}
    for name, shape, reading in weights:
        owner = module.get_submodule(name.rpartition(".")[0])
        if not is_layer(owner) and (text := reading.unsaid_batch(shape)):
            found.setdefault(text, []).append(name)
    return found


def check_use(
    module: nn.Module, name: str, parameter: Tensor, reading: Stiefel, *, is_said: bool
) -> None:
    """Refuse an embedding that rewrites its rows; warn where a reading does not suit a weight.

    Args:
        module: The model, in which ``name`` is that of the parameter.
        is_said: Whether the caller has said how many blocks there are, if only one.
    """
    owner = module.get_submodule(name.rpartition(".")[0])
    modules = (each for each in module.modules() if isinstance(each, TABLES))
    table = next((each for each in modules if each._parameters.get("weight") is parameter), None)
    if table is not None and table.max_norm is not None:
        remedy = "set it to None: each forward pass would shorten rows of a constrained weight"
        raise ValueError(fail(f"max_norm of {name}", "be None", table.max_norm, remedy))
    dims = reading.dims(parameter.ndim)
    may_mix = reading.rows is None and not dims.batch and len(dims.rows) == 1
    texts = [_mixed(parameter, reading, name, is_said=is_said) if may_mix else ""]
    if table is not None or is_head(module, owner, name):
        texts.append(_short(parameter, reading, name, 1 if table is not None else _RATIO))
    texts.append(_padded(table, reading, name))
    for text in filter(None, texts):
        warnings.warn(text, stacklevel=users_level())


def _mixed(parameter: Tensor, reading: Stiefel, name: str, *, is_said: bool) -> str:
    """Return a warning of blocks, or of one matrix, across several one above the other."""
    row_count, column_count = reading.size(parameter.shape)
    heads, called = reading.heads, name.lower()
    pair = next((held for held, known in _PAIRS.items() if known.search(called)), "")
    is_named = bool(_QKV.search(called))
    is_fused = row_count == 3 * column_count
    is_turned = column_count == 3 * row_count and not reading.transposed
    if type(heads) is int and is_fused and heads % 3:
        third = row_count // 3
        return (
            f"`{name}` has three times as many rows as columns: if it holds queries, keys and "
            f"values, {heads} blocks of {row_count // heads} rows mix them; pass heads={3 * heads} "
            f"for the heads of all three, or rows=((0, {third}), ({third}, {2 * third})) as well, "
            "for queries and keys"
        )
    if type(heads) is int and heads != 2 and pair and not is_named and row_count % 2 == 0:
        half = row_count // 2
        return (
            f"`{name}` seems to hold {pair}: {heads} blocks of {row_count // heads} rows "
            f"mix them, or two heads of one; pass rows=((0, {half}), ({half}, {row_count})) as "
            "well, with the heads of one of them"
        )
    if not is_named and _MAYBE_QKV.search(called):
        is_named = is_fused or is_turned
    if heads is not None or is_said or not (is_named or pair):
        return ""
    count, held = (3, "queries, keys and values") if is_named else (2, pair)
    is_turned &= is_named
    part, rest = divmod(column_count if is_turned else row_count, count)
    edges = ", ".join(f"({i * part}, {(i + 1) * part})" for i in range(count))
    more = ", a multiple for heads of each" if is_named else ""
    remedy = f"heads={count}{more}, or rows=({edges})"
    turned = "transposed=True and " if is_turned else ""
    return (
        f"`{name}` seems to hold {held}, as one matrix of {row_count} x {column_count}: none of "
        f"them becomes orthonormal; pass {turned}{'rows= the range of each' if rest else remedy}; "
        "heads=1 says that it is one matrix"
    )


def _short(parameter: Tensor, reading: Stiefel, name: str, ratio: int) -> str:
    """Return a warning of rows, what a table returns, that get short."""
    count, width = reading.size(parameter.shape)
    if reading != replace(Stiefel(), transposed=reading.transposed) or count <= ratio * width:
        return ""
    return (
        f"`{name}` has {count} rows and {width} columns: its columns become orthonormal, "
        f"and its rows {math.sqrt(width / count):.2g} long on average, without being "
        "orthogonal; pass scale='keep' for rows as long as now, scale='rms' for length 1, "
        "or leave the layer unconstrained"
    )


def _padded(table: Any, reading: Stiefel, name: str) -> str:
    """Return a warning of a row of an embedding that pads, if it is part of a matrix."""
    place = getattr(table, "padding_idx", None)
    if place is None:
        return ""
    count, ranges = table.num_embeddings, cast("Any", reading.rows)
    if not any(start <= place < stop for start, stop in ranges or ((0, count),)):
        return ""
    others = [pair for pair in ((0, place), (place + 1, count)) if pair[0] < pair[1]]
    shown = str(others[0]) if len(others) == 1 else f"{tuple(others)}, two matrices,"
    return (
        f"row {place} of `{name}` pads, and would not stay zero: it is a row of an orthonormal "
        f"matrix, and Adam makes it as long as others; pass rows={shown} to so.constrain"
    )


def is_head(module: nn.Module, owner: nn.Module, name: str) -> bool:
    """Say whether a linear layer seems to be the last one of a model, by its name or place."""
    if not isinstance(owner, nn.Linear) or "lora" in name.lower():
        return False
    *_, last = ["", *name.split(".")[:-1]]
    if _HEADS.fullmatch(last.lower()):
        return True
    if owner.in_features < _WIDTH:
        return False
    if owner is module:
        return owner.out_features >= _VOCABULARY
    return owner is [each for each in module.modules() if isinstance(each, nn.Linear)][-1]


def warn_of_tokens(module: nn.Module, found: Iterable[tuple[str, nn.Module, Tensor]]) -> None:
    """Warn of positions and tokens among what a pattern or function chose, and of heads then."""
    found = list(found)
    strange = [name for name, owner, value in found if _is_token(owner, value, name)]
    if not strange:
        return
    strange += [name for name, owner, _ in found if is_head(module, owner, name)]
    shown = ", ".join(f"`{name}`" for name in dict.fromkeys(strange))
    warnings.warn(
        f"{shown} seem to be positions, tokens or heads, whose lengths a constraint fixes: choose "
        f"weights of layers, as so.constrain(model, {HIDDEN}) does",
        stacklevel=users_level(),
    )


def _is_token(owner: nn.Module, value: Tensor, name: str) -> bool:
    """Say whether a parameter belongs to no layer of torch, or to a table, and seems no matrix."""
    is_layer = type(owner).__module__.startswith("torch.nn.modules")
    *_, layer, leaf = ["", *name.lower().split(".")]
    if isinstance(owner, TABLES):
        return bool(re.match(r"(w?pos(ition)?|wpe)(_|$)", layer))
    if is_layer and not isinstance(owner, (nn.ParameterList, nn.ParameterDict)):
        return False
    return (value.ndim > 2 and value.size(0) == 1) or bool(_TOKENS.search(leaf))
