"""Constrain the projections of attention modules, which are recognised by their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from torch import nn
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_module, fail, type_name
from stiefel_opt.tags import Stiefel, apply_readings, check_value, in_words, scaled, table

# Attribute names of the linear layers, each with the projections it holds, side by side.
# Layouts that mix the heads of queries, keys and values (``query_key_value``, ``qkv_proj``) are
# missing on purpose: their order of rows differs between models of the same attribute name.
Layout = tuple[tuple[str, str], ...]
LAYOUTS: Final[tuple[Layout, ...]] = (
    (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")),  # LLaMA, CLIP, BART, GPT-J
    (("query", "q"), ("key", "k"), ("value", "v")),  # BERT, ViT
    (("query_proj", "q"), ("key_proj", "k"), ("value_proj", "v")),  # DeBERTa
    (("to_q", "q"), ("to_k", "k"), ("to_v", "v")),  # diffusers
    (("q_lin", "q"), ("k_lin", "k"), ("v_lin", "v")),  # DistilBERT
    (("c_q", "q"), ("c_k", "k"), ("c_v", "v")),  # nanochat
    (("wq", "q"), ("wk", "k"), ("wv", "v")),  # LLaMA as first released
    (("w_q", "q"), ("w_k", "k"), ("w_v", "v")),  # textbooks
    (("q", "q"), ("k", "k"), ("v", "v")),  # T5
    (("q_attn", "q"), ("c_attn", "kv")),  # GPT-2, looking at another sequence
    (("to_q", "q"), ("to_kv", "kv")),  # lucidrains, looking at another sequence
    (("q", "q"), ("kv", "kv")),  # timm, pooling and reduced keys
    (("qkv", "qkv"),),  # timm
    (("to_qkv", "qkv"),),  # lucidrains
    (("c_attn", "qkv"),),  # GPT-2
    (("Wqkv", "qkv"),),  # ModernBERT
)
# What projects the joined heads back; a fused weight with fewer key heads shows in its inputs.
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
    "o",
    "dense",
    "out",
)
# BERT: the joined heads of ``attention.self`` are projected by ``attention.output.dense``.
SELF: Final = "self"
BESIDE_WEIGHT: Final = "output.dense.weight"
HEADS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
KEY_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "num_heads_kv",
    "n_kv_heads",
    "n_kv_head",
)
ATTENTION_WORDS: Final = ("attention", "attn")


@dataclass(frozen=True)
class _Weight:
    """A weight: its name below the module, its projections, and how many rows each of them has."""

    name: str
    projections: str
    size: int
    transposed: bool


class _UnreadableError(Exception):
    """Why a module that looks like attention cannot be read."""


@dataclass(frozen=True)
class AttentionReport:
    """Result of :func:`constrain_attention`; printing it shows a table.

    Attributes:
        constraint: ``"within"`` or ``"across"``.
        which: The constrained projections, a part of ``"qkvo"``.
        lines: ``(parameter, class of the module, reading in words, how far it moved)`` for each
            constrained weight.
        skipped: ``(module, reason)`` for each module that looks like attention and is unchanged.
    """

    constraint: str
    which: str
    lines: tuple[tuple[str, str, str, str], ...]
    skipped: tuple[tuple[str, str], ...]

    @override
    def __str__(self) -> str:
        text = f"{self.which} constrained {self.constraint} heads\n"
        text += table([("parameter", "module", "reading", "moved"), *self.lines])
        if self.skipped:
            text += "\nnot constrained:\n" + listed(self.skipped)
        return text


def constrain_attention(
    model: nn.Module,
    constraint: Literal["within", "across"] = "within",
    which: str = "qk",
    *,
    scale: float | Literal["keep", "rms"] = 1.0,
    learn_scale: bool = False,
    names: Mapping[str, str] | None = None,
) -> AttentionReport:
    r"""Put the query and key weights of every attention module in ``model`` on the manifold.

    With H heads of width d and weights that map E features:

    - ``"within"``: each head's weights are in St(E, d), so that no head measures the same
      direction twice;
    - ``"across"``: the heads side by side are in St(E, H d), so that no two heads do either.

    Found by their attributes, without importing the packages: ``nn.MultiheadAttention`` of torch
    and of this package (also inside ``nn.TransformerEncoderLayer``), timm (``qkv``), transformers
    (``q_proj``/``query``/``q`` and so on, and the transposed ``c_attn`` of GPT-2), lucidrains
    (``to_qkv``); others by ``names``. Grouped keys have fewer heads than queries; their number
    follows from the shapes.

    Args:
        model: A model, or one attention module.
        constraint: ``"within"`` or ``"across"``. Default: ``"within"``.
        which: The projections to constrain, of ``"q"``, ``"k"``, ``"v"`` and ``"o"``, the one of
            the joined heads; "within", the columns that read one head are a matrix of it. Default:
            ``"qk"``.
        scale: As in :func:`stiefel_opt.constrain`: "keep" for a trained model.
        learn_scale: As in :func:`stiefel_opt.constrain`; "within", one number for each head.
        names: What a module calls its linear layers, ``{"q": "w_q", "k": "w_k", "v": "w_v"}`` or
            ``{"qkv": "in_map"}``, ``"o"`` that of the joined heads, and ``"heads"`` its attribute
            with their number. Default: the names above.

    Returns: The constrained weights, and the modules that look like attention but are unchanged.
    Raises:
        ValueError: for another constraint or ``which``, or if no module can be read; it lists the
            modules. Nothing is changed then.
        TypeError: for weights of a dtype that :func:`stiefel_opt.constrain` refuses, and ``names``
            that are no dict of strings.

    Note: Values become the nearest point, as by :func:`stiefel_opt.constrain`. Where H d > E the
        weights of "across" are tall, and their columns are orthonormal: the report says so, and how
        far each weight moved as a part of its length: a trained model may have to be trained on.
    Reference: Kong, Wang & Tao (ICLR 2023), table 1.
    """
    check_module("model", model)
    check_choice("constraint", constraint, ("within", "across"))
    in_order = isinstance(which, str) and "".join(each for each in "qkvo" if each in which)
    if not which or which != in_order:
        wanted = "be one or more of 'q', 'k', 'v', 'o', in this order"
        raise ValueError(fail("which", wanted, repr(which)))
    layouts = Names.of(names)
    plans, skipped = plans_of(model, constraint, which, layouts)
    if not plans:
        wanted = "contain an attention module that can be read"
        remedy = remedy_for(model, skipped, layouts.layouts)
        raise ValueError(fail("model", wanted, f"a {type(model).__name__}", remedy))
    lines = constrain_found(model, found_of(model, plans), scale, learn_scale)
    for path in plans:
        if _is_constrained_attention(module := model.get_submodule(path)):
            vars(module).update(constraint=constraint, learn_scale=learn_scale)
    return AttentionReport(constraint, which, lines, tuple(skipped.items()))


Found = tuple[str, str, Stiefel]  # name of a weight, class of its module, and how it is read
Lines = tuple[tuple[str, str, str, str], ...]


def found_of(model: nn.Module, plans: Mapping[str, Sequence[tuple[str, Stiefel]]]) -> list[Found]:
    """Return the weights of attention modules by their names in the model."""
    found = []
    for path, plan in plans.items():
        for name, reading in plan:
            owner = path.rpartition(".")[0] if name == BESIDE_WEIGHT else path
            kind = type(model.get_submodule(path)).__name__
            found.append((f"{owner}.{name}" if owner else name, kind, reading))
    return found


def constrain_found(
    model: nn.Module, found: Iterable[Found], scale: float | str, learn_scale: bool
) -> Lines:
    """Constrain weights; return the lines of a report: name, class, reading, how far each moved."""
    readings: dict[str, Stiefel] = {}
    kinds: dict[str, str] = {}
    for name, kind, reading in found:
        parameter = model.get_parameter(name)
        check_value(parameter, reading, name)
        own = scaled(reading, parameter, scale, name)
        readings[name], kinds[name] = replace(own, learn_scale=learn_scale), kind
    lines = []
    keeps = scale == "keep" and not learn_scale
    for name, share in apply_readings(model, readings, keeps=keeps).items():
        words = in_words(model, name, model.get_parameter(name).shape, readings[name])
        lines.append((name, kinds[name], words, "-" if share is None else f"{share:.0%}"))
    return tuple(lines)


def _is_constrained_attention(module: nn.Module) -> bool:
    """Say whether a module is the attention of this package, which tells its constraint."""
    return isinstance(module, nn.MultiheadAttention) and "constraint" in vars(module)


def plans_of(
    model: nn.Module, constraint: str, which: str, names: Names
) -> tuple[dict[str, list[tuple[str, Stiefel]]], dict[str, str]]:
    """Return the readings of each attention module, and why similar modules have none, by path."""
    plans: dict[str, list[tuple[str, Stiefel]]] = {}
    skipped: dict[str, str] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        above, _, leaf = path.rpartition(".")
        beside = modules.get(above) if leaf == SELF else None
        try:
            if plan := _plan(module, constraint, which, names, beside):
                plans[path] = plan
        except _UnreadableError as reason:
            skipped[path] = f"{type(module).__name__}: {reason}"
    for path in list(skipped):  # a wrapper around one that was read, or a part of it
        if any(_below(other, path) or _below(path, other) for other in plans):
            del skipped[path]
    return plans, skipped


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
        if "".join(sorted("".join(letters for _, letters in layout))) not in ("kq", "kqv"):
            wanted = "name q, k and perhaps v, each once, or what holds them side by side, as 'qkv'"
            raise ValueError(fail("names", wanted, dict(names)))
        layout.sort(key=lambda item: "qkv".index(item[1][0]))
        heads = (names["heads"],) if "heads" in names else HEADS
        return cls((tuple(layout),), heads, (names["o"],) if "o" in names else OUTPUTS)


def _plan(
    module: nn.Module, constraint: str, which: str, names: Names, above: nn.Module | None
) -> list[tuple[str, Stiefel]]:
    """Return (parameter, reading) for each weight of an attention module, nothing for others."""
    weights = _torch_weights(module, which) or _linear_weights(module, names.layouts)
    if not weights:
        return []
    wanted = [weight for weight in weights if set(weight.projections) & set(which)]
    missing = set(which) - {"o"} - set("".join(weight.projections for weight in weights))
    if missing:
        raise _UnreadableError(f"it has no linear layer for {sorted(missing)}")
    stated = _number(module, KEY_HEADS)
    fused = any(len(weight.projections) == 3 for weight in weights)
    if fused and _is_mixed(module):
        name = weights[0].name
        raise _UnreadableError(f"each head of {name} holds its query, key and value in turn")
    if fused and stated not in (None, _number(module, names.heads)):
        raise _UnreadableError(f"one weight holds queries and the keys of {stated} heads")
    heads = dict.fromkeys("qkv", 1)
    if constraint == "within" or (stated and _number(module, names.heads)):
        found = _heads(module, weights, names.heads)
        if stated not in (None, found["k"]):
            width = f"its keys have the width of {found['k']} heads"
            raise _UnreadableError(f"{width}, but it states {stated}")
        heads = found if constraint == "within" else heads
    plan = [(weight.name, _reading(weight, heads, which)) for weight in wanted]
    if "o" in which:
        sizes = {letter: weight.size for weight in weights for letter in weight.projections}
        joined = sizes.get("v", 0) * heads["q"] // heads["v"] if constraint == "within" else 0
        plan.append(_output(module, names.outputs, above, heads["q"], joined))
    return plan


def _is_mixed(module: nn.Module) -> bool:
    """Say whether a fused weight holds query, key and value of one head, then of the next."""
    known = vars(module)
    return (
        known.get("multi_query") is False  # GPT-BigCode
        or known.get("head_first") is True  # MaxViT of timm
        or {"key_dim", "val_dim"} <= known.keys()  # TinyViT, EfficientFormer and LeViT of timm
    )


def _output(
    module: nn.Module, outputs: Sequence[str], above: nn.Module | None, heads: int, joined: int = 0
) -> tuple[str, Stiefel]:
    """Return name and reading of the weight that projects the joined heads."""
    children = dict(module.named_children())
    layers = [
        (f"{name}.{inner}" if inner else name, layer)
        for name in outputs
        for inner, layer in (children[name].named_modules() if name in children else ())
    ]
    if above is not None:
        beside = BESIDE_WEIGHT.removesuffix(".weight")
        layers += [item for item in above.named_modules() if item[0] == beside]
    linear = [item for item in layers if isinstance(item[1], nn.Linear) or is_conv1d(item[1])]
    if len(linear) != 1:
        known = ", ".join(name for name, _ in linear) or "none"
        raise _UnreadableError(f"it has {known} for the output; say names={{'o': ...}}")
    name, layer = linear[0]
    weight = _linear_weight(layer, name, "o")
    inputs = layer.weight.size(0 if weight.transposed else 1)
    if joined and inputs != joined:
        raise _UnreadableError(f"{name} has {inputs} inputs, its heads {joined} values")
    if inputs % heads:
        raise _UnreadableError(f"{heads} heads do not divide the {inputs} inputs of {name}")
    if heads == 1:
        return weight.name, Stiefel(transposed=weight.transposed)
    return weight.name, Stiefel(heads, transposed=not weight.transposed)


def is_conv1d(layer: nn.Module) -> bool:
    """Say whether this is the linear layer of GPT-2, which stores its weight transposed."""
    return type(layer).__name__ == "Conv1D" and isinstance(getattr(layer, "nf", None), int)


def _torch_weights(module: nn.Module, which: str) -> list[_Weight]:
    """Return the weights of torch's own attention."""
    if not isinstance(module, nn.MultiheadAttention):
        return []
    if _is_constrained_attention(module) and which != "qk":
        raise _UnreadableError("it constrains 'qk' itself; take torch's module for other weights")
    width = module.embed_dim
    if "in_proj_weight" not in module._parameters:
        raise _UnreadableError("its in_proj_weight is computed by a parametrization")
    if module.in_proj_weight is not None:
        return [_Weight("in_proj_weight", "qkv", width, False)]
    return [_Weight(f"{letter}_proj_weight", letter, width, False) for letter in "qkv"]


def _linear_weights(module: nn.Module, layouts: Sequence[Layout]) -> list[_Weight]:
    """Return the weights of the first layout that fits."""
    children = dict(module.named_children())
    for layout in layouts:
        present = [(name, letters) for name, letters in layout if name in children]
        if len(present) == len(layout) or (len(layout) == 3 and len(present) == 2):
            if present[0][1][0] != "q" or "k" not in "".join(letters for _, letters in present):
                continue
            weights = [_linear_weight(children[name], name, letters) for name, letters in present]
            if len(weights[0].projections) == 3:
                _check_fused(children, weights[0])
            return weights
    if any(word in type(module).__name__.lower() for word in ATTENTION_WORDS):
        names = [*children, *(name for name, _ in module.named_parameters(recurse=False))]
        if names:
            raise _UnreadableError(f"its parts are {', '.join(names)}")
    return []


def _linear_weight(layer: nn.Module, name: str, letters: str) -> _Weight:
    weight = layer._parameters.get("weight")
    kind = type_name(layer)
    transposed = is_conv1d(layer)
    if weight is None or weight.ndim != 2 or not (isinstance(layer, nn.Linear) or transposed):
        raise _UnreadableError(f"{name} is a {kind}, not a linear layer with a plain weight")
    row_count = weight.size(1 if transposed else 0)
    if row_count % len(letters):
        raise _UnreadableError(f"{name} has {row_count} outputs, not {len(letters)} equal parts")
    return _Weight(f"{name}.weight", letters, row_count // len(letters), transposed)


def _check_fused(children: dict[str, nn.Module], weight: _Weight) -> None:
    """Raise where the output layer shows that queries, keys and values are no equal parts."""
    for name in OUTPUTS:
        for layer in children[name].modules() if name in children else ():
            if isinstance(layer, nn.Linear) and layer.in_features != weight.size:
                parts = f"{weight.name} is not three parts of {weight.size} rows"
                raise _UnreadableError(f"{parts} if {name} takes {layer.in_features} inputs")


def _heads(module: nn.Module, weights: Sequence[_Weight], called: Sequence[str]) -> dict[str, int]:
    """Return the number of heads of each projection."""
    heads = _number(module, called)
    if heads is None:
        raise _UnreadableError(
            f"neither it nor its config has one of {', '.join(called)}; say names={{'heads': ...}}"
        )
    sizes = {letter: weight.size for weight in weights for letter in weight.projections}
    width, rest = divmod(sizes["q"], heads)  # queries and keys meet in products of this width
    if rest or sizes["k"] % width:
        shown = f"queries of {sizes['q']} and keys of {sizes['k']}"
        raise _UnreadableError(f"{heads} heads do not divide {shown}")
    key_heads = sizes["k"] // width
    if "v" in sizes and sizes["v"] % key_heads:
        raise _UnreadableError(f"{key_heads} heads do not divide values of {sizes['v']}")
    return {"q": heads, "k": key_heads, "v": key_heads}


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first attribute of the module or its config that is a positive integer."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value: Any = getattr(owner, name, None)
            if type(value) is int and value > 0:
                return value
    return None


def _reading(weight: _Weight, heads: dict[str, int], which: str) -> Stiefel:
    chosen = [place for place, letter in enumerate(weight.projections) if letter in which]
    counts = tuple(heads[weight.projections[place]] for place in chosen)
    if len(chosen) == len(weight.projections) and len(set(counts)) == 1:  # equal, no row is plain
        return Stiefel(heads=sum(counts), transposed=weight.transposed)
    ranges = tuple((place * weight.size, (place + 1) * weight.size) for place in chosen)
    return Stiefel(counts, ranges, transposed=weight.transposed)


def _below(path: str, ancestor: str) -> bool:
    return path == ancestor or not ancestor or path.startswith(ancestor + ".")


def listed(skipped: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"  {path or 'the model itself'}: {reason}" for path, reason in skipped)


def remedy_for(model: nn.Module, skipped: dict[str, str], layouts: Sequence[Layout]) -> str:
    known = "; ".join(", ".join(name for name, _ in layout) for layout in layouts)
    advice = (
        "say what it calls its layers, names={'q': 'w_q', 'k': 'w_k'}, or name the weights "
        f"yourself with so.constrain(model, name, heads=...). It looked for the layers {known}"
    )
    if skipped:
        shown = list(skipped.items())
        more = f"\n  and {len(shown) - 12} more" if len(shown) > 12 else ""
        return f"{advice}. Modules that look like attention:\n{listed(shown[:12])}{more}"
    kinds = sorted({type(module).__name__ for module in model.modules()})
    return f"{advice}. Its modules are: {', '.join(kinds[:30])}"
