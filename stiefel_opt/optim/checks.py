"""What is refused before a step or a group changes anything, and how a group reads parameters."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from stiefel_opt.errors import (
    NOTHING_CONSTRAINED,
    check_choice,
    check_dtype,
    check_flag,
    check_range,
    fail,
    users_level,
)
from stiefel_opt.functional.flows import METRICS
from stiefel_opt.numerics.device import has_values, overlap, readable, span_of
from stiefel_opt.numerics.distributed import local_part
from stiefel_opt.optim.commit import LARGEST_SAFE
from stiefel_opt.optim.sharding import Shards
from stiefel_opt.optim.state import State
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.tags.foreign import known_modules
from stiefel_opt.tags.manifold import Stiefel, manifold_of, reading_by, said_by
from stiefel_opt.tags.points import check_phase
from stiefel_opt.tags.watch import records_of

NONFINITE: Final = ("skip", "raise", "ignore")
TRANSPORTS: Final = ("isometric", "projected")
RADII: Final = ("virtual", "angle")
LEARNERS: Final = (
    "choose StiefelSGD, StiefelAdamW or StiefelMuon, or constrain the weight without learn_scale"
)


# ---- how a group reads its parameters, and what they are called ----------------------------------


def reading(parameter: Tensor, group: Group) -> Stiefel | None:
    """Return how a group reads a parameter: the group's key if it has one, else the tag."""
    return reading_by(group["stiefel"], parameter)


def listed(params: Any) -> Any:
    """Return ``params``, a tensor or an iterable, as a list.

    A set is returned as it is: it has no order, and torch raises an error for it.
    """
    if isinstance(params, Tensor):
        return [params]
    check_params(params)
    return params if isinstance(params, set) else list(params)


def check_params(params: Any) -> None:
    """Raise for a model in place of its parameters."""
    if isinstance(params, nn.Module):
        given = f"a {type(params).__name__}"
        raise TypeError(fail("params", "be parameters", given, "pass model.parameters()"))


def completed(param_group: Group, defaults: Group) -> Group:
    """Return a new group with all options, as plain data for checkpoints; raise for its ``lr``."""
    group = {**defaults, **param_group}
    said = said_by(group["stiefel"])
    group["stiefel"] = said.as_dict() if isinstance(said, Stiefel) else said
    group["params"] = listed(group["params"])
    for name, value in group.items():
        if isinstance(value, numbers.Real) and type(value).__module__ != "builtins":  # numpy's
            group[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
    check_lr(group["lr"])
    return group


def described(optimizer: Any, last: str = "") -> str:
    """Return an optimizer in words: its options, as torch prints them, and what is constrained.

    ``last``: how the last step was taken.
    """
    lines, groups = [f"{type(optimizer).__name__} ("], optimizer.param_groups
    for number, group in enumerate(groups):
        shown = resolved(optimizer.resolved(group), stiefel="by tags")
        if isinstance(shown["stiefel"], Mapping):
            shown["stiefel"] = Stiefel.from_dict(shown["stiefel"])
        options = [f"    {key}: {shown[key]}" for key in sorted(shown) if key != "params"]
        lines += [f"Parameter Group {number}", *options, ""]
    lines[-1] = ")"
    pairs = [(p, reading(p, group)) for group in groups for p in group["params"]]
    counts = [manifold.count(p.shape) for p, manifold in pairs if manifold is not None]
    matrices, taken = _counted(sum(counts), "matrix", "matrices"), f"\nLast step: {last}."
    return "\n".join(lines) + (
        f"\nConstrained: {matrices} in {_counted(len(counts))}."
        f"\nUnconstrained: {_counted(len(pairs) - len(counts))}." + (taken if last else "")
    )


def resolved(group: Group, **meant: Any) -> Group:
    """Return a group in which options that are None have these values."""
    return group | {name: value for name, value in meant.items() if group[name] is None}


def _counted(number: int, one: str = "parameter", several: str = "parameters") -> str:
    return f"{number} {one if number == 1 else several}"


def label(group: Group, index: int, number: int) -> str:
    """Return what a message calls a parameter: its name, or its place in the group ``number``."""
    names = group.get("param_names")
    return f"parameter {index} of group {number}" if names is None else str(names[index])


def names_of(parameters: Sequence[Tensor], groups: list[Group]) -> list[str]:
    """Return the label of each of some parameters of ``groups``, after one walk through them."""
    wanted, labels = {id(parameter) for parameter in parameters}, {}
    for number, group in enumerate(groups):
        for index, other in enumerate(group["params"]):
            if id(other) in wanted:
                labels[id(other)] = label(group, index, number)
    return [labels[id(parameter)] for parameter in parameters]


def in_short(names: Sequence[str], most: int = 8) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_of(parameter: Tensor, groups: list[Group]) -> str:
    """Return the label of a parameter of ``groups``."""
    return names_of([parameter], groups)[0]


# ---- options -----------------------------------------------------------------------------------


def check_common_options(group: Group, optimizer: Any) -> None:
    """Raise unless the options that all optimizers share, and those of torch, make sense."""
    check_choice("nonfinite", group["nonfinite"], NONFINITE)
    check_cuda_graph(group, type(optimizer).__name__, is_capturable=optimizer.capturable)
    for name in ("weight_decay", "scale_pull"):
        check_range(name, group.get(name, 0.0), 0.0)
    check_flag("maximize", group.get("maximize", False))
    if group.get("differentiable", False) is not False:
        remedy = "differentiate through a parametrization, stiefel_opt.orthogonal, instead"
        raise ValueError(fail("differentiable", "be False", group["differentiable"], remedy))
    for name in ("foreach", "fused"):
        if group.get(name) is not None:
            check_flag(name, group[name])
    if group.get("foreach") and group.get("fused"):
        raise ValueError(fail("fused", "not be True together with foreach", True))


def check_cuda_graph(group: Group, rule: str, *, is_capturable: bool) -> None:
    """Raise unless ``cuda_graph`` is None or a flag, and True only where a rule can be captured."""
    wanted = group.get("cuda_graph")
    if wanted is None:
        return
    check_flag("cuda_graph", wanted)
    if wanted and not is_capturable:
        remedy = f"{rule} does not say that its rule is capturable"
        raise ValueError(fail("cuda_graph", "be None or False", True, remedy))
    if wanted and group["nonfinite"] == "raise":
        remedy = "nonfinite='raise' reads a number in every step"
        raise ValueError(fail("cuda_graph", "be None or False", True, remedy))


def check_lr(lr: Any) -> None:
    """Raise unless a learning rate is a number of at least 0, or a tensor of one."""
    if not isinstance(lr, Tensor):
        check_range("lr", lr, 0.0)
    elif lr.numel() != 1:
        raise ValueError(fail("lr", "have one element", f"shape {tuple(lr.shape)}"))
    elif (value := readable(lr)) is not None:
        check_range("lr", float(value), 0.0)


def check_saved_lr(lr: Any) -> None:
    """Raise for a learning rate that no step can use; one below 0, of a schedule, it can."""
    check_lr(-lr if _is_number(lr) and -math.inf < lr < 0 else lr)


def _is_number(lr: Any) -> bool:
    return isinstance(lr, numbers.Real) or (isinstance(lr, Tensor) and lr.numel() == 1)


# A learning rate is limited so that its square fits float32; rotations saturate long before.
LARGEST_LR: Final = 2.0**50


def usable_lr(lr: Any) -> float | Tensor:
    """Return a learning rate as a number where it can be read, and not too large a one.

    Raise unless it is one finite number, which a schedule may bring below 0, or a tensor that
    cannot be read.
    """
    if not _is_number(lr):
        check_lr(lr)  # raises, and says what it must be
    value: Any = readable(lr) if isinstance(lr, Tensor) else lr
    if value is None:
        return lr  # type: ignore[no-any-return]
    if not math.isfinite(value):
        raise ValueError(fail("lr", "be finite", float(lr), "look at its schedule"))
    return min(float(value), LARGEST_LR)


def check_metric(group: Group) -> None:
    """Raise unless ``metric`` is one."""
    if isinstance(group["metric"], str):
        check_choice("metric", group["metric"], METRICS)
    else:
        check_range("metric", group["metric"], -math.inf, 1.0, open_low=True)


def check_transport(group: Group) -> None:
    """Raise unless ``transport`` is one."""
    if group["transport"] == "published":
        remedy = "take so.PublishedSGD or so.PublishedAdam"
        raise TypeError(fail("transport", "be 'isometric' or 'projected'", "'published'", remedy))
    check_choice("transport", group["transport"], TRANSPORTS)


def check_radius(group: Group) -> None:
    """Raise unless ``radius`` is one."""
    radius = group["radius"]
    if isinstance(radius, str):
        check_choice("radius", radius, RADII)
    elif radius is not None:
        check_range("radius", radius, 0.0, open_low=True)


# ---- parameters and gradients --------------------------------------------------------------------


# Words for what a group can say by ``stiefel`` only, as ``stiefel=so.Stiefel(heads=4)``.
_READINGS = (
    *("heads", "blocks", "manifold", "orthogonal", "constrained", "scale"),
    *("rowdims", "columndims", "learnscale", "determinant"),
)
# Other libraries' and papers' names of options, which no scheduler stores in a group.
_SYNONYMS = {
    "learningrate": "lr",
    "stepsize": "lr",
    "eta": "lr",
    "epsilon": "eps",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "l2": "weight_decay",
    "beta": "momentum",
    "momentum": "betas",
    "betas": "momentum",
    **dict.fromkeys(_READINGS, "stiefel"),
}


# Options of before that are classes of their own now.
_MOVED = {
    "adaptive": "so.AdaptiveSGD or so.AdaptiveAdam",
    "rotation": "so.PublishedSGD or so.PublishedAdam",
}


def check_option_names(group: Group, known: Collection[str], rule: str) -> None:
    """Raise for a key of a group that means an option, such as "weightdecay" or "epsilon".

    Other unknown keys pass, as in torch: schedulers and users add "initial_lr", "name".
    """
    spelled = {_letters(name): name for name in known}
    synonyms = {word: option for word, option in _SYNONYMS.items() if option in known}
    for name in group:
        if name == "params" or any(f"_{option}_" in f"_{name}_" for option in known):
            continue  # an option, or made of one: "max_momentum" of a scheduler
        if name in _MOVED:
            remedy = f"take {_MOVED[name]}"
            raise TypeError(fail(name, f"not be an option of {rule}", repr(group[name]), remedy))
        letters = _letters(str(name))
        near = difflib.get_close_matches(letters, spelled, 1, 0.8 if len(letters) > 3 else 1.0)
        meant = spelled[near[0]] if near else synonyms.get(letters)
        if meant:
            options = ", ".join(sorted(known))
            remedy = f"did you mean {meant}? The options are: {options}"
            wanted = f"be an option of {rule}"
            raise TypeError(fail(str(name), wanted, repr(group[name]), remedy))


def naming_options(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that says of an unknown option, such as "momentum", what it means."""
    kinds = inspect.signature(init).parameters
    is_open = any(each.kind is each.VAR_KEYWORD for each in kinds.values())

    @functools.wraps(init)
    def named(self: Any, *given: Any, **options: Any) -> None:
        unknown = {name: value for name, value in options.items() if name not in kinds}
        if unknown and not is_open:
            allowed = [name for name in kinds if name not in ("self", "params")]
            check_option_names(unknown, allowed, type(self).__name__)
        init(self, *given, **options)

    return named


def name_options(kind: type) -> None:
    """Let the constructor of a class, if it has its own, name the options that are meant."""
    if "__init__" in vars(kind):
        kind.__init__ = naming_options(kind.__init__)  # type: ignore[misc]


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def check_new_group(group: Group, optimizer: Any) -> None:
    """Raise for parameters that torch would accept but that cannot be constrained."""
    groups = optimizer.param_groups
    seen = {id(parameter) for other in groups for parameter in other["params"]}
    for index, item in enumerate(group["params"]):
        name, parameter = item if isinstance(item, tuple) else (None, item)
        if not isinstance(parameter, Tensor):
            continue  # refused by torch
        called = name or label({}, index, len(groups))
        if id(parameter) in seen:
            remedy = "list every parameter in one group only"
            raise ValueError(fail(called, "appear once", "it twice", remedy))
        seen.add(id(parameter))
        manifold = reading(parameter, group)
        if manifold is not None:
            manifold.check(parameter.shape, called)
            check_dtype(called, parameter.dtype)
            own = local_part(parameter)
            if has_values(own) and not bool(torch.isfinite(own).all()):
                remedy = "initialise it before optimizing"
                raise ValueError(fail(called, "be finite", "NaN or inf", remedy))
    check_learned_scale(group, optimizer)


def check_learned_scale(group: Group, optimizer: Any) -> None:
    """Raise for a weight whose scale is to be learned, with a rule that cannot move it so."""
    if optimizer.learns_scale and optimizer.scale_rule_for(group).step is not None:
        return
    groups = optimizer.param_groups
    number = next((i for i, each in enumerate(groups) if each is group), len(groups))
    for index, item in enumerate(group["params"]):
        name, parameter = item if isinstance(item, tuple) else (None, item)
        manifold = reading(parameter, group) if isinstance(parameter, Tensor) else None
        if manifold is not None and manifold.learn_scale:
            called = f"learn_scale of {name or label(group, index, number)}"
            raise ValueError(fail(called, f"be False for {optimizer.rule}", True, LEARNERS))


def check_memory(groups: list[Group]) -> None:
    """Raise for a constrained parameter whose memory another parameter has too.

    Views that share a buffer without sharing an element, as ``nn.GRU`` flattens its weights, pass.
    """
    owners: dict[torch.device, list[tuple[int, int, int, Any]]] = {}
    for group in groups:
        for parameter in group["params"]:
            if (span := span_of(local_part(parameter))) is not None:
                is_constrained = reading(parameter, group) is not None
                places = owners.setdefault(parameter.device, [])
                places.append((*span, len(places), (parameter, is_constrained)))
    for places in owners.values():
        open_spans: list[tuple[int, Any]] = []  # that end behind the beginning of this one
        for start, stop, _, own in sorted(places):
            open_spans = [(end, other) for end, other in open_spans if end > start]
            for _, other in open_spans:
                if (own[1] or other[1]) and overlap(local_part(own[0]), local_part(other[0])):
                    one, two = names_of([other[0], own[0]], groups)
                    wanted = f"have memory of its own: it shares some with {two}, and one of them "
                    wanted += "is constrained"
                    given = f"shape {tuple(other[0].shape)} and shape {tuple(own[0].shape)}"
                    remedy = "tie modules by one parameter, second.weight = first.weight, or give "
                    remedy += "one of them a copy"
                    raise ValueError(fail(one, wanted, given, remedy))
            open_spans.append((stop, own))


def check_shapes(
    parameters: list[Tensor], readings: Sequence[Stiefel | None], groups: list[Group]
) -> None:
    """Raise for a parameter that cannot be read so: the key of a group may change in training."""
    names = names_of(parameters, groups)
    for name, parameter, manifold in zip(names, parameters, readings, strict=True):
        if manifold is not None:
            manifold.check(parameter.shape, name)
            check_phase(manifold.determinant, parameter, name)


def check_sharing(
    shards: Shards, parameter: Tensor, optimizer: Any, declared: Sequence[State]
) -> None:
    """Raise for rows on several processes, with rules that do not say they work so."""
    rule, given = optimizer.rule, f"placements {shards.stored}"
    across = [state.name for state in declared if state.shape == "nn"]
    plain = shards.manifold.plain_parts(torch.empty(parameter.shape, device="meta"))
    is_cut = not all(placement.is_replicate() for placement in shards.working)
    if shards.row_sum is not None and across:
        wanted = f"not have its rows on several processes for {rule}, whose state {across} is n x n"
        remedy = "shard its batch or head dimension, or replicate it"
    elif shards.row_sum is not None and not optimizer.sums_over_rows:
        wanted = f"not have its rows on several processes for {rule}, which does not sum over them"
        remedy = "shard its batch or head dimension, or replicate it; a rule that forms every sum "
        remedy += "over rows by `sums` says sums_over_rows = True"
    elif plain and is_cut and not optimizer.plain_is_elementwise:
        wanted = f"not have its plain rows on several processes for {rule}, which may need all"
        remedy = "replicate it, or make its plain rows a parameter of their own; an update_plain "
        remedy += "that moves each entry by itself says plain_is_elementwise = True"
    else:
        return
    called = name_of(parameter, optimizer.param_groups)
    raise ValueError(fail(called, wanted, given, remedy))


def check_family(kind: type, family: type) -> None:
    """Raise for a plain rule in a class of a ``family``, which calls torch's rule instead."""
    for each in kind.__mro__[: kind.__mro__.index(family)]:
        for name in ("init_plain", "update_plain"):
            if name in vars(each):
                condition = f"leave plain tensors to torch's rule, as {family.__name__} does"
                remedy = "derive it from so.optim.StiefelOptimizer for a plain rule of its own"
                raise TypeError(fail(kind.__name__, condition, name, remedy))


def warn_if_nothing_is_constrained(groups: list[Group]) -> None:
    """Warn where matrices are optimized and none is tagged, unless that is intended.

    It is where each matrix of a model has an optimizer of its own, and another is constrained.
    """
    parameters = [p for group in groups for p in group["params"]]
    matrices = [p for p in parameters if p.ndim >= 2]
    if (
        matrices
        and all(group["stiefel"] is None for group in groups)
        and not any(manifold_of(p) or hasattr(p, "computes_orthonormal") for p in parameters)
        and not (len(matrices) == 1 and any(map(records_of, known_modules())))
    ):
        warnings.warn(NOTHING_CONSTRAINED, stacklevel=users_level())


def check_finite(parameters: Sequence[Tensor], groups: list[Group]) -> None:
    """Raise for a value that cannot be projected."""
    for parameter in parameters:
        own = local_part(parameter)
        if has_values(own) and not bool(torch.isfinite(own).all()):
            given = f"NaN or inf in a tensor of shape {tuple(parameter.shape)}"
            remedy = "initialise it, or load a good checkpoint"
            raise ValueError(fail(name_of(parameter, groups), "be finite", given, remedy))


def refuse_gradient(parameter: Tensor, groups: list[Group]) -> NoReturn:
    """Raise for a gradient of another shape, which torch would broadcast, or another dtype."""
    grad: Tensor = parameter.grad  # type: ignore[assignment]
    condition = f"have shape {tuple(parameter.shape)} and dtype {parameter.dtype}"
    given = f"shape {tuple(grad.shape)} and dtype {grad.dtype}"
    remedy = "set it to None and run backward again"
    if grad.dtype != parameter.dtype:  # torch makes one of another dtype only on request
        remedy += " with no other grad_dtype"
    raise ValueError(fail(f"grad of {name_of(parameter, groups)}", condition, given, remedy))


def refuse_nonfinite(parameter: Tensor, groups: list[Group]) -> NoReturn:
    """Raise for a gradient that is not finite or safe."""
    condition = f"be finite and shorter than {LARGEST_SAFE[parameter.dtype]:.0e}"
    given = f"NaN, inf or more in a tensor of shape {tuple(parameter.shape)}"
    remedy = "look for its cause, or choose nonfinite='skip'"
    raise ValueError(fail(f"grad of {name_of(parameter, groups)}", condition, given, remedy))


def refuse_overflow(parameter: Tensor, groups: list[Group]) -> NoReturn:
    """Raise for a step that left floating point although its gradient was safe."""
    given = f"an overflow in a tensor of shape {tuple(parameter.shape)}"
    remedy = "lower lr or momentum; its point stays as it was, and its momentum starts again"
    raise ValueError(fail(f"step of {name_of(parameter, groups)}", "be finite", given, remedy))


def refuse_sparse(parameter: Tensor, groups: list[Group]) -> NoReturn:
    """Raise for a sparse gradient."""
    given = f"one of shape {tuple(parameter.shape)} that is sparse"
    remedy = "use sparse=False in the layer that produces it"
    raise TypeError(fail(f"grad of {name_of(parameter, groups)}", "be dense", given, remedy))


def refuse_other_precision(
    parameters: Sequence[Tensor], state: Mapping[Any, Any], groups: list[Group], error: Exception
) -> None:
    """Raise where torch's own rule stops at state of another dtype than its parameter."""
    for parameter in parameters:
        for name, value in state[parameter].items():
            if name != "step" and isinstance(value, Tensor) and value.dtype != parameter.dtype:
                called = f"{name} of {name_of(parameter, groups)}"
                remedy = "after a change of precision call opt.load_state_dict(opt.state_dict())"
                condition = f"have dtype {parameter.dtype}"
                raise ValueError(fail(called, condition, value.dtype, remedy)) from error


def warn_of_skipped(parameters: Sequence[Tensor], groups: list[Group]) -> None:
    """Say which parameters were left as they were."""
    pairs = zip(names_of(parameters, groups), parameters, strict=True)
    _warn(in_short([f"{name} of shape {tuple(parameter.shape)}" for name, parameter in pairs]))


def warn_of_long_steps(parameters: Sequence[Tensor], groups: list[Group], steps: int) -> None:
    """Say which parameters every step turns by more than half a right angle."""
    names = in_short(names_of(parameters, groups))
    warnings.warn(
        f"Each of the last {steps} steps turned {names} by more than 45 degrees: "
        "nothing can be learned so. Begin again with a tenth of lr.",
        stacklevel=users_level(),
    )


def warn_of_restarts(parameters: Sequence[Tensor], groups: list[Group]) -> None:
    """Say which momentum starts again, as options have changed what it is measured in."""
    if parameters:
        names = in_short(names_of(parameters, groups))
        warnings.warn(
            f"The momentum of {names} starts again: options of the group have changed, and "
            "with them what it is measured in.",
            stacklevel=users_level(),
        )


def warn_of_skip_counts(skip_counts: Mapping[str, int], reported: int) -> int:
    """Say which parameters missed steps if more did than ``reported``; return their number."""
    total = sum(skip_counts.values())
    if total > reported:
        _warn(", ".join(f"{name} ({count} steps)" for name, count in skip_counts.items()))
    return total


def _warn(names: str) -> None:
    warnings.warn(
        f"The gradient of {names}, or the step it made, was not finite: the step was skipped, and "
        "the momentum starts again if it overflowed. "
        "Find the cause; nonfinite='raise' stops there, 'ignore' skips the check.",
        stacklevel=users_level(),
    )
