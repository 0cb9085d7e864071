"""How the weights of an attention module are read, by their names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import nn

from stiefel_opt.errors import fail, type_name
from stiefel_opt.tags import Stiefel

# Attribute names of the linear layers, each with the order of its rows: projections side by side,
# as "qkv"; "(qkv)": the same of one head of keys after the other; "?qkv": models differ. A layer
# without an order only tells which model it is. Other letters, of latent attention: what queries
# are made of (a), keys and values (c), and the part of keys that is rotated (r).
Layout = tuple[tuple[str, str], ...]
LAYOUTS: Final[tuple[Layout, ...]] = (
    (("q_a_proj", "a"), ("q_b_proj", "q"), ("kv_a_proj_with_mqa", "cr"), ("kv_b_proj", "(kv)")),
    (("q_proj", "q"), ("kv_a_proj_with_mqa", "cr"), ("kv_b_proj", "(kv)")),  # DeepSeek
    (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")),  # LLaMA, CLIP, BART, GPT-J
    (("query", "q"), ("key", "k"), ("value", "v")),  # BERT, ViT
    (("query_proj", "q"), ("key_proj", "k"), ("value_proj", "v")),  # DeBERTa
    (("to_q", "q"), ("to_k", "k"), ("to_v", "v")),  # diffusers
    (("q_lin", "q"), ("k_lin", "k"), ("v_lin", "v")),  # DistilBERT
    (("linear_q", "q"), ("linear_k", "k"), ("linear_v", "v")),  # ESPnet, Conformer
    (("c_q", "q"), ("c_k", "k"), ("c_v", "v")),  # nanochat
    (("wq", "q"), ("wk", "k"), ("wv", "v")),  # LLaMA as first released
    (("Wq", "q"), ("Wk", "k"), ("Wv", "v")),  # CTRL
    (("w_q", "q"), ("w_k", "k"), ("w_v", "v")),  # textbooks
    (("project_q", "q"), ("project_k", "k"), ("project_v", "v")),  # CPM-Ant
    (("q", "q"), ("k", "k"), ("v", "v")),  # T5
    (("q_attn", "q"), ("c_attn", "kv")),  # GPT-2, looking at another sequence
    (("to_q", "q"), ("to_kv", "kv")),  # lucidrains, looking at another sequence
    (("q", "q"), ("kv", "kv")),  # timm, pooling and reduced keys
    (("qk", "qk"), ("v", "v")),  # TNT
    (("queries", "q"), ("keys_values", "(kv)")),  # LeViT, shrinking
    (("queries_keys_values", "(qkv)"),),  # LeViT
    (("query_key_value", "(qkv)"),),  # GPT-NeoX, BLOOM, Falcon
    (("qkv_proj", "qkv"), ("o_proj", "")),  # Phi-3
    (("qkv_proj", "?qkv"),),  # CodeGen, MiniMax
    (("qkv", "qkv"),),  # timm
    (("to_qkv", "qkv"),),  # lucidrains
    (("c_attn", "qkv"),),  # GPT-2
    (("Wqkv", "qkv"),),  # ModernBERT, MPT
    (("att_proj", "qkv"),),  # Bark
    (("in_proj", "(qkv)"),),  # DeBERTa as first released
)
# What projects the joined heads back; its inputs tell the width of a head of values. In BERT it is
# ``attention.output.dense``, beside ``attention.self``.
OUTPUTS: Final = (
    "proj",
    "out_proj",
    "o_proj",
    "to_out",
    "c_proj",
    "Wo",
    "wo",
    "w_o",
    "out_lin",
    "linear_out",
    "attention_out",
    "projection",
    "o",
    "dense",
    "out",
    "output",
)
BESIDE: Final = "output"
HEADS: Final = (
    "num_heads",
    "num_attention_heads",
    "num_attn_heads",
    "n_heads",
    "n_head",
    "heads",
    "nhead",
)
KEY_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "num_heads_kv",
    "n_kv_heads",
    "n_kv_head",
    "kv_heads",
)
ATTENTION_WORDS: Final = ("attention", "attn")
EVERYTHING: Final = "qkvogacr"  # with gates beside the queries, and the parts of latent attention


class _Weight(NamedTuple):
    """A weight: its name below the module above, the order of its rows, and its shape."""

    name: str
    order: str
    row_count: int
    column_count: int
    transposed: bool

    @property
    def letters(self) -> str:
        return self.order.strip("(?)")


Heads = dict[str, tuple[int, int]]  # number of the heads of each projection, and their width


class UnreadableError(Exception):
    """Why a module that looks like attention cannot be read."""


class Names(NamedTuple):
    """Attribute names to look up."""

    layouts: tuple[Layout, ...] = LAYOUTS
    heads: tuple[str, ...] = HEADS
    outputs: tuple[str, ...] = OUTPUTS

    @classmethod
    def of(cls, names: Mapping[str, str] | None) -> Names:
        """Return the names that a user gives, by default those of the known packages."""
        if names is None:
            return cls()
        if not isinstance(names, Mapping) or not all(isinstance(n, str) for n in names.values()):
            raise TypeError(fail("names", "be a dict of names", repr(names)))
        layout = [(name, kind) for kind, name in names.items() if kind not in ("heads", "o")]
        letters = "".join(kind.removeprefix("(").removesuffix(")") for _, kind in layout)
        if "".join(sorted(letters)) not in ("kq", "kqv"):
            wanted = (
                "name q, k and perhaps v, each once, or what holds them side by side, as 'qkv', or "
                "one head after the other, as '(qkv)'"
            )
            raise ValueError(fail("names", wanted, dict(names)))
        layout.sort(key=lambda item: "qkv".index(item[1].strip("()")[0]))
        heads = (names["heads"],) if "heads" in names else HEADS
        return cls((tuple(layout),), heads, (names["o"],) if "o" in names else OUTPUTS)


def plan_of(
    module: nn.Module, constraint: str, which: str, names: Names, above: nn.Module | None
) -> list[tuple[str, Stiefel, bool]]:
    """Return (parameter, reading, whether beside) of an attention module, nothing for others."""
    weights = _torch_weights(module, which) or _linear_weights(module, names.layouts)
    if not weights:
        return []
    chosen = {*which, "r"} if "k" in which else {*which}
    if missing := chosen & set("qkv") - set("".join(weight.letters for weight in weights)):
        raise UnreadableError(f"it has no linear layer for {sorted(missing)}")
    outputs = _outputs(module, names.outputs, above)
    inputs = outputs[0][0].column_count if len(outputs) == 1 else 0
    is_within = constraint == "within"
    heads = _heads(module, weights, names.heads, inputs, is_within)
    plan = []
    for weight in weights:
        if not chosen & set(weight.letters):
            continue
        is_whole = is_within and chosen >= set(weight.letters)
        stated = _number(module, KEY_HEADS)
        is_fused = {"q", "k"} <= set(weight.letters)
        if is_fused and stated not in (None, heads["k"][0]) and not is_whole:
            width = f"its keys have the width of {heads['k'][0]} heads"
            raise UnreadableError(f"{width}, but it states {stated}")
        order = "(qg)" if weight.letters == "q" and "g" in heads else weight.order
        plan.append((weight.name, _reading(weight, order, heads, chosen, is_within), False))
    if "o" in which:
        if len(outputs) != 1:
            known = ", ".join(output.name.removesuffix(".weight") for output, _ in outputs)
            remedy = "say names={'o': ...}"
            raise UnreadableError(f"it has {known or 'none'} for the output; {remedy}")
        ((weight, is_beside),) = outputs
        number = heads["q"][0]
        values = number * heads["v"][1] if "v" in heads else inputs
        name = weight.name.removesuffix(".weight")
        if is_within and inputs != values:
            raise UnreadableError(f"{name} has {inputs} inputs, its heads {values} values")
        if is_within and inputs % number:
            raise UnreadableError(f"{number} heads do not divide the {inputs} inputs of {name}")
        reading = Stiefel(transposed=weight.transposed)
        if is_within and number > 1:  # columns that read one head
            reading = Stiefel(number, transposed=not weight.transposed)
        plan.append((weight.name, reading, is_beside))
    return plan


def _is_mixed(module: nn.Module) -> bool:
    """Say whether a fused weight holds query, key and value of one head, then of the next."""
    known = vars(module)
    return (
        known.get("multi_query") is False  # GPT-BigCode
        or known.get("head_first") is True  # MaxViT of timm
        or {"key_dim", "val_dim"} <= known.keys()  # TinyViT, EfficientFormer and LeViT of timm
    )


def _outputs(
    module: nn.Module, outputs: Sequence[str], above: nn.Module | None
) -> list[tuple[_Weight, bool]]:
    """Return the weights that may project the joined heads, and whether they stand beside it."""
    for owner, names in ((module, outputs), (above, (BESIDE,))):
        children = dict(owner.named_children()) if owner is not None else {}
        found = [
            (_weight_of(layer, joined(name, inner), "o"), owner is above)
            for name in names
            for inner, layer in (children[name].named_modules() if name in children else ())
            if is_linear(layer)
        ]
        if found:
            return found
    return []


def is_called_attention(module: nn.Module, path: str = "") -> bool:
    called = f"{type(module).__name__} {path.rpartition('.')[2]}".lower()
    return any(word in called for word in ATTENTION_WORDS)


def is_linear(layer: nn.Module) -> bool:
    """Say whether this is a linear layer with a plain weight, of torch or another package."""
    weight = layer._parameters.get("weight")
    is_known = isinstance(layer, nn.Linear) or is_conv1d(layer)
    called = type(layer).__name__.lower()
    is_known = is_known or any(word in called for word in ("linear", "router"))
    return is_known and weight is not None and weight.ndim == 2


def is_conv1d(layer: nn.Module) -> bool:
    """Say whether this is the linear layer of GPT-2, which stores its weight transposed."""
    return type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int)


def is_constrained_attention(module: nn.Module) -> bool:
    """Say whether a module is the attention of this package, which tells its constraint."""
    return isinstance(module, nn.MultiheadAttention) and "constraint" in vars(module)


def _torch_weights(module: nn.Module, which: str) -> list[_Weight]:
    """Return the weights of torch's own attention."""
    if not isinstance(module, nn.MultiheadAttention):
        return []
    if is_constrained_attention(module) and which != "qk":
        raise UnreadableError("it constrains 'qk' itself; take torch's module for other weights")
    if "in_proj_weight" not in module._parameters:
        raise UnreadableError("its in_proj_weight is computed by a parametrization")
    if module.in_proj_weight is not None:
        named = [("in_proj_weight", "qkv")]
    else:
        named = [(f"{letter}_proj_weight", letter) for letter in "qkv"]
    shapes = {name: module.get_parameter(name).shape for name, _ in named}
    return [_Weight(name, order, shapes[name][0], shapes[name][1], False) for name, order in named]


def _linear_weights(module: nn.Module, layouts: Sequence[Layout]) -> list[_Weight]:
    """Return the weights of the first layout that fits."""
    children = dict(module.named_children())
    is_called = is_called_attention(module)
    for layout in layouts:
        present = [(name, order) for name, order in layout if name in children]
        missing = {*layout} - {*present}
        if any(order != "v" for _, order in missing):
            continue
        is_sure = len(layout) > 1 or "q" in layout[0][0] or layouts is not LAYOUTS
        if not (is_sure or is_called):
            continue
        weights = [_linear_weight(children[name], name, order) for name, order in present if order]
        if _is_mixed(module):
            weights = [
                weight._replace(order=f"({weight.letters})") if len(weight.letters) > 1 else weight
                for weight in weights
            ]
        return weights
    has_weights = any(
        parameter.ndim > 1 and "bias" not in name
        for part in (module, *children.values())
        for name, parameter in part.named_parameters(recurse=False)
    )
    if is_called and has_weights:
        names = [*children, *(name for name, _ in module.named_parameters(recurse=False))]
        raise UnreadableError(f"its parts are {', '.join(names)}")
    return []


def _linear_weight(layer: nn.Module, name: str, order: str) -> _Weight:
    """Return the weight of a linear layer, or of the only one in a module that has no other."""
    found = [(inner, part) for inner, part in layer.named_modules() if is_linear(part)]
    if len(found) != 1 or sum(each.ndim > 1 for each in layer.parameters()) != 1:
        kind = type_name(layer)
        raise UnreadableError(f"{name} is a {kind}, not a linear layer with a plain weight")
    return _weight_of(found[0][1], joined(name, found[0][0]), order)


def _weight_of(layer: nn.Module, name: str, order: str) -> _Weight:
    transposed = is_conv1d(layer)
    row_count, column_count = layer.get_parameter("weight").shape[:: -1 if transposed else 1]
    return _Weight(f"{name}.weight", order, row_count, column_count, transposed)


def _heads(
    module: nn.Module, weights: Sequence[_Weight], called: Sequence[str], inputs: int, needed: bool
) -> Heads:
    """Return number and width of the heads of each projection, by the shapes.

    Queries and keys meet in products of one width; the joined heads, ``inputs``, are as many heads
    of values as there are of queries.
    """
    rows = {weight.letters: weight.row_count for weight in weights}
    number = _number(module, called)
    width = _number(module, ("head_dim",))
    if number is None and width and "q" in rows and rows["q"] % width == 0:
        number = rows["q"] // width
    if number is None and not needed:  # one matrix for each projection
        parts = [(letters, count // len(letters)) for letters, count in rows.items()]
        return {letter: (1, count) for letters, count in parts for letter in letters}
    if number is None:
        raise UnreadableError(
            f"neither it nor its config has one of {', '.join(called)}; say names={{'heads': ...}}"
        )
    value = 0 if inputs % number else inputs // number
    stated = _number(module, KEY_HEADS)
    if len(weights[0].letters) == 3:
        return _fused_heads(weights[0], number, stated, value)
    if "cr" in rows:
        return _latent_heads(weights, number)
    return _separate_heads(rows, number, width, stated, value)


def _separate_heads(
    rows: dict[str, int], number: int, width: int | None, stated: int | None, value: int
) -> Heads:
    """Return the heads of queries, keys and values; keys and values may be one weight."""
    for letters in {"qk", "kq"} & rows.keys():  # equal parts
        rows["q"] = rows["k"] = rows.pop(letters) // 2
    pair = rows.get("kv") or rows.get("vk")
    shown = f"queries of {rows['q']} and keys of {pair or rows['k']}"
    own, rest = divmod(rows["q"], number)
    heads = {"q": (number, own)}
    if not width:
        width = rows.get("k", 0) // stated if stated else 0
    if rows["q"] == 2 * number * width:  # each query has a gate beside it
        own = width
        heads = {"q": (number, own), "g": (number, own)}
    keys, left = divmod(pair or rows["k"], max(1, own + (value or own) if pair else own))
    if rest or left or not keys:
        raise UnreadableError(f"{number} heads do not divide {shown}")
    heads["k"] = keys, own
    is_known = stated in (None, keys)
    if pair:
        heads["v"] = keys, value or own
    elif "v" in rows:
        agrees = value > 0 and rows["v"] in (keys * value, number * value)
        many = rows["v"] // value if agrees else keys
        if rows["v"] % many:
            raise UnreadableError(f"{many} heads do not divide values of {rows['v']}")
        heads["v"] = many, rows["v"] // many
        is_known = is_known or agrees  # the number is not of this module
    if not is_known:
        raise UnreadableError(f"its keys have the width of {keys} heads, but it states {stated}")
    return heads


def _fused_heads(weight: _Weight, number: int, stated: int | None, value: int) -> Heads:
    """Return the heads of one weight that holds them all."""
    size = weight.row_count
    for keys in dict.fromkeys((stated or number, number)):
        width, rest = divmod(size, number + 2 * keys)
        if not rest and value in (0, width):
            return {"q": (number, width), "k": (keys, width), "v": (keys, width)}
    width, rest = divmod(size - number * value, 2 * number)
    if not value or rest or width < 1 or weight.order != "(qkv)":
        parts = f"{number} heads of queries and {stated or number} of keys and values"
        shown = f"{weight.name} has {size} rows, which are no {parts}"
        raise UnreadableError(f"{shown} of width {value}" if value else shown)
    return {"q": (number, width), "k": (number, width), "v": (number, value)}


def _latent_heads(weights: Sequence[_Weight], number: int) -> Heads:
    """Return the heads of latent attention: keys are made of latents, but for a rotated part."""
    known = {weight.letters: weight for weight in weights}
    latent = known["kv"].column_count
    rotated = known["cr"].row_count - latent
    query, pair = known["q"].row_count // number, known["kv"].row_count // number
    own = query - rotated
    if known["kv"].row_count % number or min(rotated, own, pair - own) < 1:
        shown = f"queries of {query}, latents of {latent} and a rotated part of {rotated}"
        raise UnreadableError(f"{number} heads have {shown}, keys and values of {pair}")
    heads = {"q": (number, query), "k": (number, own), "v": (number, pair - own)}
    heads |= {"c": (1, latent), "r": (1, rotated)}
    return heads | ({"a": (1, known["a"].row_count)} if "a" in known else {})


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first attribute of the module or its config that is a positive integer."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value: Any = getattr(owner, name, None)
            if type(value) is int and value > 0:
                return value
    return None


def _reading(
    weight: _Weight, order: str, heads: Heads, chosen: set[str], is_within: bool
) -> Stiefel:
    """Return how the chosen rows of a weight are read, one matrix for each head within."""
    letters, in_turn = order.strip("(?)"), order[0] == "("
    is_whole = chosen >= set(letters) and len({heads[letter][1] for letter in letters}) == 1
    name = weight.name.removesuffix(".weight")
    if order[0] == "?" and not (is_whole and is_within):
        layer = name.partition(".")[0]
        raise UnreadableError(
            f"the order of the rows of {name} differs between models; say names={{'qkv': "
            f"'{layer}'}} if queries, keys and values stand side by side, {{'(qkv)': '{layer}'}} "
            "for one head after the other"
        )
    if in_turn and not is_within:
        raise UnreadableError(
            f"{name} holds one head after the other, no matrix of all queries; use 'within'"
        )
    turns = min(heads[letter][0] for letter in letters) if in_turn else 1
    spans: list[tuple[int, int, int]] = []  # start, stop, width
    stop = 0
    for letter in letters * turns:
        number, width = heads[letter]
        start, stop = stop, stop + number // turns * width
        if letter in chosen:
            width = width if is_within else stop - start
            if in_turn and spans and spans[-1][1:] == (start, width):
                start = spans.pop()[0]
            spans.append((start, stop, width))
    counts = tuple((stop - start) // width for start, stop, width in spans)
    if is_whole and len({width for _, _, width in spans}) == 1:  # no row is plain
        return Stiefel(heads=sum(counts), transposed=weight.transposed)
    ranges = tuple((start, stop) for start, stop, _ in spans)
    return Stiefel(counts, ranges, transposed=weight.transposed)


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
