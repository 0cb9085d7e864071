"""Constrain the projections of attention modules, which are recognised by their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_module, fail
from stiefel_opt.tags import Stiefel, apply_readings, check_value, scaled
from stiefel_opt.tools.projections import (
    Layout,
    Names,
    UnreadableError,
    is_called_attention,
    is_constrained_attention,
    joined,
    plan_of,
)
from stiefel_opt.tools.report import in_words, table


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
        head = f"{self.which} constrained {self.constraint} heads\n"
        return head + shown(self.lines, self.skipped)


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
    (``q_proj``/``query``/``q`` and so on, the transposed ``c_attn`` of GPT-2, ``query_key_value``
    of GPT-NeoX, BLOOM and Falcon, the latent attention of DeepSeek), lucidrains (``to_qkv``);
    others by ``names``. Grouped keys have fewer heads than queries; their number follows from the
    shapes. Where one weight holds all of one head before the next, each head is a range of rows.

    Args:
        model: A model, or one attention module.
        constraint: ``"within"`` or ``"across"``. Default: ``"within"``.
        which: The projections to constrain, of ``"q"``, ``"k"``, ``"v"`` and ``"o"``, the one of
            the joined heads; "within", the columns that read one head are a matrix of it. Default:
            ``"qk"``.
        scale: As in :func:`stiefel_opt.constrain`: "keep" for a trained model.
        learn_scale: As in :func:`stiefel_opt.constrain`; "within", one number for each head.
        names: What a module calls its linear layers, ``{"q": "w_q", "k": "w_k", "v": "w_v"}`` or
            ``{"qkv": "in_map"}``, ``"(qkv)"`` where one head is behind the other, ``"o"`` that of
            the joined heads, and ``"heads"`` its attribute with their number. Default: the names
            above.

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
    found = found_of(model, plans, skipped, layouts)
    lines = constrain_found(model, found, scale, learn_scale)
    for path in plans:
        if is_constrained_attention(module := model.get_submodule(path)):
            vars(module).update(constraint=constraint, learn_scale=learn_scale)
    return AttentionReport(constraint, which, lines, tuple(skipped.items()))


Found = tuple[str, str, Stiefel]  # name of a weight, class of its module, and how it is read
Plans = dict[str, list[tuple[str, Stiefel]]]  # weights and readings of each attention module


def found_of(
    model: nn.Module, plans: Plans, skipped: Mapping[str, str], names: Names
) -> list[Found]:
    """Return the weights of attention modules, with the classes of these; raise for none."""
    if not plans:
        wanted = "contain an attention module that can be read"
        remedy = _remedy_for(model, skipped, names.layouts)
        raise ValueError(fail("model", wanted, f"a {type(model).__name__}", remedy))
    return [
        (name, type(model.get_submodule(path)).__name__, reading)
        for path, plan in plans.items()
        for name, reading in plan
    ]


def constrain_found(
    model: nn.Module, found: Iterable[Found], scale: float | str, learn_scale: bool
) -> tuple[tuple[str, str, str, str], ...]:
    """Constrain weights; return the lines of a report: name, class, reading, how far each moved."""
    readings: dict[str, Stiefel] = {}
    kinds: dict[str, str] = {}
    for name, kind, reading in found:
        parameter = model.get_parameter(name)
        check_value(parameter, reading, name)
        own = scaled(reading, parameter, scale, name)
        readings[name], kinds[name] = replace(own, learn_scale=learn_scale), kind
    lines = []
    for name, share in apply_readings(model, readings, keeps=scale == "keep").items():
        words = in_words(model, name, model.get_parameter(name).shape, readings[name])
        lines.append((name, kinds[name], words, "-" if share is None else f"{share:.0%}"))
    return tuple(lines)


def plans_of(
    model: nn.Module, constraint: str, which: str, names: Names
) -> tuple[Plans, dict[str, str]]:
    """Return the readings of each attention module, and why similar modules have none, by path."""
    plans: Plans = {}
    skipped: dict[str, str] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        owner, _, _ = path.rpartition(".")
        is_part = bool(path) and is_called_attention(modules[owner], owner)
        above = modules[owner] if is_part else None
        try:
            if plan := plan_of(module, constraint, which, names, above):
                plans[path] = [
                    (joined(owner if is_beside else path, name), reading)
                    for name, reading, is_beside in plan
                ]
        except UnreadableError as reason:
            skipped[path] = f"{type(module).__name__}: {reason}"
    for path in list(skipped):  # a wrapper around one that was read, or a part of it
        if any(is_within(other, path) or is_within(path, other) for other in plans):
            del skipped[path]
    return plans, skipped


def shown(lines: Sequence[Sequence[str]], skipped: Sequence[tuple[str, str]]) -> str:
    """Return the table of a report, and what is not constrained."""
    text = table([("parameter", "module", "reading", "moved"), *lines])
    if skipped:
        text += "\nnot constrained (so.constrain(model, name) takes what you name):\n"
    return text + listed(skipped)


def is_within(path: str, module: str) -> bool:
    """Say whether a path is that of this module or of a part of it."""
    return not module or f"{path}.".startswith(f"{module}.")


def listed(skipped: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"  {path or 'the model itself'}: {reason}" for path, reason in skipped)


def _remedy_for(model: nn.Module, skipped: Mapping[str, str], layouts: Sequence[Layout]) -> str:
    known = ", ".join(dict.fromkeys(layout[0][0] for layout in layouts))
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
