"""From a model to its constraints and on to an optimizer: constrain, retag, param_groups.

The record on the module, see :mod:`stiefel_opt.tags.watch`, restores the tag at any time.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_opt.errors import (
    NOTHING_CONSTRAINED,
    check_dtype,
    check_flag,
    check_module,
    check_writable,
    fail,
    find_parameter,
    is_factor,
    listing,
    none_found,
    users_level,
)
from stiefel_opt.numerics.device import has_values
from stiefel_opt.numerics.distributed import gathered, is_sharded, replicated
from stiefel_opt.tags.foreign import known_modules, note_module
from stiefel_opt.tags.layers import CONVOLUTIONS, stacked
from stiefel_opt.tags.manifold import Stiefel, is_others, manifold_of
from stiefel_opt.tags.parameter import tag, untag
from stiefel_opt.tags.points import (
    check_phase,
    check_projectable,
    is_alike,
    kept_scale,
    nearest,
    reading_of,
    rms_scale,
)
from stiefel_opt.tags.trained import FirstPoints
from stiefel_opt.tags.uses import check_uses, warn_of_batches
from stiefel_opt.tags.watch import FLAT, GROUPED, mark_maps, record, records_of, watch

MOVED: Final = "_stiefel_moved"  # {parameter name: distance}, in the owner's __dict__

ModuleT = TypeVar("ModuleT", bound=nn.Module)


# ---- constrain ---------------------------------------------------------------------------------


def constrain(
    module: ModuleT,
    name: str | Iterable[str] | Callable[[str, nn.Parameter], bool] = "weight",
    *,
    heads: int | Sequence[int] | None = None,
    rows: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
    flatten: bool | None = None,
    transposed: bool = False,
    scale: float | Literal["keep", "rms"] = 1.0,
    learn_scale: bool = False,
    determinant: int | None = None,
    row_dims: int | Sequence[int] | None = None,
    column_dims: int | Sequence[int] | None = None,
    project: bool = True,
) -> ModuleT:
    r"""Put parameters of ``module`` on the Stiefel manifold and return the module.

    Choose this with the optimizers of this package where a step should be cheap and follow the
    geometry; choose :func:`stiefel_opt.orthogonal` where another optimizer should train the weight.

    The value becomes the nearest point, ``scale`` times the polar factor of each matrix; matrices
    that are there already stay bit for bit. The parameter object stays the same, so optimizers,
    hooks and tied modules keep it; keys and shapes of ``state_dict`` do not change. How far the
    value moved is in :func:`stiefel_opt.report`.

    Args:
        module: Owner of the parameters, or one of its ancestors.
        name: The parameter, dotted below an ancestor: ``"encoder.q.weight"``. Several: a pattern as
            of file names, ``"*.weight_hh_l*"``; a list of names and patterns; or a function that
            says of each name and parameter whether it is meant. Factors from which torch computes a
            weight (``weight_norm``, ``spectral_norm``, ``orthogonal``, pruning) are left out.
        heads, rows, transposed: The reading, see :class:`Stiefel`. Default: all rows, in as many
            blocks as the module stacks: one for each gate of ``nn.LSTM`` and ``nn.GRU`` and their
            cells, each group of a convolution, and each head of queries, keys and values in
            ``nn.MultiheadAttention``; one in all other modules. ``heads=1`` asks for one.
        flatten: Read ``(C_out, C_in, *kernel)`` as ``(C_out, C_in * prod(kernel))``. Default: True
            for convolutions. A transposed convolution stores ``(C_in, C_out, *kernel)`` and is
            read as the convolution whose adjoint it is, one row for each input channel.
        scale: As in :class:`Stiefel`. "keep" takes the root mean square of the singular values, so
            that a trained weight keeps its norm, and one of ``nn.init.orthogonal_`` its gain, and
            takes it anew from what ``load_state_dict`` brings. "rms" takes sqrt(rows / columns) of
            a matrix, sqrt(out / in) of a linear layer: then outputs of a tall one are as large as
            inputs, by their root mean squares.
        learn_scale: The weight is g Q: Q is orthonormal and the number g, one for each matrix, is
            trained, from ``scale`` on, to which the optimizer pulls it back. With "keep" a matrix
            that is g Q already keeps its own g. Loading values does not move that start. See
            :mod:`stiefel_opt.functional.learned_scale`. Default: no.
        determinant: 1 or -1: square real matrices become rotations, or reflections, and stay so.
            A value of the other sign that was orthonormal, or seems trained, warns. Default: None,
            as it comes: the nearest point, of either sign.
        row_dims, column_dims: The dimensions of the rows and of the columns, see :class:`Stiefel`.
            Default: the last two; where there are more, and nothing is said, this warns.
        project: False leaves the value as it is; the first step with lr > 0 projects it.

    Raises:
        ValueError: for an unknown name, the name of a factor, a pattern that matches nothing, a
            value that cannot be read so or is not finite, an embedding with ``max_norm``, or a
            weight that is tied to one with another reading. Nothing is changed then.
        TypeError: for a dtype that has no fraction, or less than float16, and for values that
            should be projected and are sharded already.

    Note:
        Parameters on the meta device are recorded and tagged, not projected. Where torch replaces
        the parameter (``to_empty``, ``fully_shard``, ``load_state_dict(assign=True)``) the tag is
        lost but the record stays: call :func:`retag` or :func:`param_groups`. The next forward pass
        warns of it (:class:`LostTagWarning`). Loading values that are off the manifold, from
        bfloat16 or another training, warns: call :func:`project_`. So do weights that look trained
        and are moved here, a weight that is zero or has not full rank, an embedding with more rows
        than columns and no ``scale``, the first step of an optimizer that knows no constraint, and
        now and then a forward pass, without gradients or of weights that no optimizer steps, where
        these were averaged or merged off the manifold.
    """
    check_module("module", module, "call so.constrain(layer, 'weight')")
    check_flag("project", project)
    names_dims = not (row_dims is None and column_dims is None)
    is_said = names_dims or transposed or not (heads is None and rows is None)
    asked: dict[str, Stiefel] = {}
    for each in _names(module, name):
        owner, leaf, parameter = _weight(module, each)
        own_heads = heads if is_said or flatten is False else stacked(owner, leaf)[0]
        own_flatten = flatten
        if flatten is None:
            own_flatten = not names_dims and _is_kernel(owner, parameter.shape, each, is_said)
        start = 1.0 if isinstance(scale, str) else scale
        options = start, learn_scale, determinant, row_dims, column_dims
        said: Any = own_heads, rows, own_flatten, transposed, *options
        reading = Stiefel(*said)
        check_value(parameter, reading, each, is_read=project or scale == "keep")
        asked[each] = scaled(reading, parameter, scale, each)
    is_chosen = callable(name) or (isinstance(name, str) and bool(set(name) & set("*?[")))
    if flatten is None:
        warn_of_batches(module, asked)
    check_uses(module, asked, is_said=heads is not None, is_chosen=is_chosen)
    apply_readings(module, asked, project=project, keeps=scale == "keep")
    return module


def _weight(module: nn.Module, name: str) -> tuple[nn.Module, str, nn.Parameter]:
    """Return the owner, the name there and the parameter; raise for what no reading can be of."""
    owner, leaf, parameter = find_parameter(module, name)
    if is_factor(module, name):
        given = "a factor from which torch computes it (a norm, orthogonal, pruning)"
        remedy = "end that first: prune.remove, remove_weight_norm, remove_parametrizations"
        raise ValueError(fail(name, "be the weight in use", given, remedy))
    manifold_of(parameter, name)  # another package's is no reading: refused
    return owner, leaf, parameter


def scaled(reading: Stiefel, parameter: Tensor, scale: Any, name: str) -> Stiefel:
    """Return a reading with a scale: a number, or what "keep" or "rms" stands for."""
    measures = {"keep": kept_scale, "rms": rms_scale}
    if not isinstance(scale, str):
        return replace(reading, scale=scale)
    if scale not in measures:
        raise ValueError(fail("scale", "be a positive number, 'keep' or 'rms'", repr(scale)))
    return replace(reading, scale=measures[scale](parameter, reading, name))


def _names(module: nn.Module, name: object) -> list[str]:
    """Return the names that a name, a pattern, a list of them or a function stands for."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if callable(name):
        try:
            inspect.signature(name).bind("", None)
        except TypeError:
            wanted = "take the name and the parameter"
            raise TypeError(fail("name", wanted, f"a function{inspect.signature(name)}")) from None
        chosen = [each for each, parameter in parameters.items() if name(each, parameter)]
    elif isinstance(name, str):
        if not set(name) & set("*?["):
            return [name]  # find_parameter says what it cannot be
        chosen = [each for each in parameters if fnmatch.fnmatchcase(each, name)]
    elif isinstance(name, Iterable) and not isinstance(name, Tensor):
        chosen = [each for given in name for each in _names(module, given)]
    else:
        return [name]  # type: ignore[list-item]  # find_parameter refuses it
    if callable(name) or isinstance(name, str):
        chosen = [each for each in chosen if not is_factor(module, each)]
    if not chosen:
        shown = listing(list(parameters))
        wanted = f"match a parameter of this {type(module).__name__}"
        given = getattr(name, "__name__", "a function") if callable(name) else repr(name)
        raise ValueError(fail("name", wanted, given, f"its parameters are: {shown or 'none'}"))
    return list(dict.fromkeys(chosen))


def check_value(
    parameter: Tensor,
    reading: Stiefel,
    name: str,
    *,
    is_read: bool = True,
    remedy: str = "initialise it first, or pass project=False",
) -> None:
    """Raise if ``reading`` cannot constrain ``parameter``, or values that are read be projected."""
    reading.check(parameter.shape, name)
    check_dtype(name, parameter.dtype)
    check_phase(reading.determinant, parameter, name)
    if not is_read:
        return
    if is_sharded(parameter):
        before = "call so.constrain before fully_shard, or project=False: the first step projects"
        raise TypeError(fail(name, "not be sharded to be projected", "a DTensor", before))
    if has_values(parameter):
        check_projectable(parameter, reading, name, remedy)
        check_writable(name, parameter)


def apply_readings(
    module: nn.Module, asked: Mapping[str, Stiefel], *, project: bool = True, keeps: bool = False
) -> dict[str, float | None]:
    """Project, record and tag parameters by name, all checked; return how far each has moved.

    With ``keeps`` a scale is that of the value: of one that is loaded, or learned of each matrix.
    """
    asked = _tied_alike(module, asked)
    moved: dict[str, float | None] = {}
    zero: list[str] = []
    points = FirstPoints()
    for name, reading in asked.items():
        owner, leaf, parameter = find_parameter(module, name)
        moved[name] = None
        if project and has_values(parameter):
            tells = bool(parameter.any())
            point, share = points.nearest(name, parameter, reading, tells=tells, keeps=keeps)
            if share == math.inf:
                zero.append(name)
            else:
                moved[name] = share
            _write(parameter, point)
        _warn_if_grouped(owner, leaf, reading)
        record(owner, leaf, reading, keeps=keeps and not reading.learn_scale)
        owner.__dict__.setdefault(MOVED, {})[leaf] = moved[name]
        tag(parameter, reading)
        vars(parameter).pop("is_unconstrained", None)
        watch(owner)
        note_module(owner)
    note_module(module)
    points.warn()
    if zero:
        warnings.warn(
            f"`{zero[0]}`{f' and {len(zero) - 1} more' if len(zero) > 1 else ''}, which was zero, "
            "becomes orthonormal: the layer does not return zero any more, as the second factor of "
            "an adapter does at first; constrain the other factor, or initialise it otherwise",
            stacklevel=users_level(),
        )
    return moved


def _tied_alike(module: nn.Module, asked: Mapping[str, Stiefel]) -> dict[str, Stiefel]:
    """Return ``asked``; raise where a weight is tied to one that is, or shall be, read otherwise.

    A scale that differs by rounding, as "keep" measures it again, becomes the earlier one.
    """
    found = [(name, *find_parameter(module, name)) for name in asked]
    wanted = {id(parameter) for _, _, _, parameter in found}
    readings_of: dict[int, tuple[str, Stiefel]] = {}
    own = {(owner, leaf) for _, owner, leaf, _ in found}  # these are read anew
    for owner in dict.fromkeys(m for root in [module, *known_modules()] for m in root.modules()):
        for leaf, reading in records_of(owner).items():
            parameter = owner._parameters.get(leaf)
            if id(parameter) in wanted and (owner, leaf) not in own:
                readings_of[id(parameter)] = f"{leaf} of {type(owner).__name__}", reading
    alike: dict[str, Stiefel] = {}
    for name, _, _, parameter in found:
        other, earlier = readings_of.setdefault(id(parameter), (name, asked[name]))
        if not is_alike(asked[name], earlier, parameter):
            wanted_reading = f"be read as `{other}` is, to which it is tied: {earlier}"
            remedy = "name both in one call of so.constrain, or call so.release first"
            raise ValueError(fail(name, wanted_reading, asked[name], remedy))
        alike[name] = earlier
    return alike


def _is_kernel(owner: nn.Module, shape: torch.Size, name: str, is_said: bool) -> bool:
    """Say whether a weight is a kernel of torch; raise if it seems to be another module's."""
    if len(shape) <= 2 or isinstance(owner, CONVOLUTIONS):
        return len(shape) > 2
    if not is_said and shape[-2:] == (1, 1) and shape.numel() > 1:
        remedy = "pass flatten=True for a kernel, flatten=False for numbers of absolute value 1"
        given = f"{shape.numel()} matrices of 1 x 1, shape {tuple(shape)}"
        raise ValueError(fail(name, "hold matrices of more than one entry", given, remedy))
    return False


def release(module: ModuleT, name: str = "weight") -> ModuleT:
    """Undo :func:`constrain`, or :func:`stiefel_opt.orthogonal`: the weight is unconstrained again.

    Args:
        module: Owner of the weight, or one of its ancestors.
        name: The weight, dotted below an ancestor.

    Returns: The module; the value stays as it is.
    Raises:
        ValueError: for an unknown name, or a weight that is not constrained, or that a
            parametrization of others computes. Nothing is changed then.
        TypeError: if ``module`` is not a module.

    Note: An optimizer of ``model.parameters()`` follows from its next step on; one that was built
        from :func:`param_groups` keeps to what these wrote down: build it anew.
    """
    check_module("module", module)
    path, _, leaf = str(name).rpartition(".")
    parent = dict(module.named_modules(remove_duplicate=False)).get(path)
    if parent is not None and parametrize.is_parametrized(parent, leaf):
        maps: Any = parent.parametrizations[leaf]
        for each in maps:
            if not isinstance(getattr(each, "manifold", None), Stiefel):  # which ours all have
                given = f"one that {type(each).__name__} computes"
                remedy = "end that first: torch.nn.utils.parametrize.remove_parametrizations"
                raise ValueError(fail(name, "be constrained to be released", given, remedy))
        parametrize.remove_parametrizations(parent, leaf)
        return module
    owner, leaf, parameter = find_parameter(module, name)
    roots: list[nn.Module] = [owner, module, *known_modules()]
    holders = _holders(roots, parameter)
    if not holders and manifold_of(parameter, name) is None:
        raise ValueError(fail(name, "be constrained to be released", "a plain parameter"))
    for other, their_leaf in holders:
        _warn_if_grouped(other, their_leaf, None)
    reread(roots, parameter, None)
    return module


def reread(roots: list[nn.Module], parameter: nn.Parameter, reading: Stiefel | None) -> None:
    """Give a parameter another reading, or none: in the records below ``roots`` and its tag."""
    for owner, leaf in _holders(roots, parameter):
        if reading is None:
            del records_of(owner)[leaf]
            owner.__dict__.get(MOVED, {}).pop(leaf, None)
        else:
            records_of(owner)[leaf] = reading
    if reading is not None:
        tag(parameter, reading)
    elif manifold_of(parameter) is not None:
        untag(parameter)


def _holders(roots: list[nn.Module], parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    """Return the owners below ``roots`` that have a record of a parameter, and its names there."""
    owners = dict.fromkeys(owner for root in roots for owner in root.modules())
    return [
        (owner, leaf)
        for owner in owners
        for leaf in records_of(owner)
        if owner._parameters.get(leaf) is parameter
    ]


def _warn_if_grouped(owner: nn.Module, leaf: str, reading: Stiefel | None) -> None:
    """Warn of a reading that changes although param_groups has written the earlier one down."""
    earlier = records_of(owner).get(leaf)
    if earlier not in (None, reading) and owner.__dict__.get(GROUPED, False):
        warnings.warn(
            f"`{leaf}` of {type(owner).__name__} was {earlier} when so.param_groups was called; "
            "an optimizer made of these groups goes on with that: build it anew",
            stacklevel=users_level(),
        )


@overload
def project_(x: ModuleT) -> ModuleT: ...
@overload
def project_(x: Tensor, manifold: Stiefel | None = None) -> Tensor: ...
def project_(x: Any, manifold: Stiefel | None = None) -> Any:
    """Replace in place every constrained matrix of a model or tensor by the nearest point.

    For values that came from elsewhere: a checkpoint in bfloat16, averaged or merged weights,
    weights that have drifted. Matrices that are orthonormal up to rounding stay bit for bit, and so
    do plain rows. A scale that is learned becomes the mean singular value. Values in half precision
    are projected in float32 and rounded; those on the meta device are skipped. Sharded ones are
    gathered: every process must call. The momentum of an optimizer is not touched: the next step
    takes the part of it that is tangent at the new point; of StiefelSGD, whose momentum U refers to
    the point that the last step wrote, up to lr |U| times the length of the edit.

    Args:
        x: A model with constrained parameters, or a tensor.
        manifold: The reading of a tensor. Default: its tag, else ``Stiefel()``. With
            ``determinant=1`` the nearest point is the nearest rotation (Kabsch).

    Returns: The model or the tensor itself.
    Raises:
        ValueError: for values that are not finite, naming the parameter, or if nothing in the model
            is constrained. Nothing has changed then, but for sharded parameters before that one.
            For a tensor that autograd has computed: :func:`polar` has the derivative.
        TypeError: if ``x`` is neither, or has no fraction.

    Note: One singular value decomposition for each matrix that is off, and a host sync.
    """
    if isinstance(x, Tensor):
        reading = reading_of(x, manifold, "x")
        _check_unrecorded(x)
        if has_values(x):
            to_nearest_(x, reading, "x")
        return x
    if manifold is not None:
        raise ValueError(fail("manifold", "be None for a model", manifold))
    tagged = [(name, p, reading) for name, (p, reading) in readings(x).items() if reading]
    if not tagged:
        remedy = "call so.constrain first"
        raise ValueError(none_found("model", "a constrained parameter", x, remedy))
    for name, parameter, reading in tagged:  # all are looked at before any is written to
        if not is_sharded(parameter):
            check_value(parameter, reading, name, remedy="initialise it first")
    for name, parameter, reading in tagged:
        if has_values(parameter):
            to_nearest_(parameter, reading, name)
    return x


def _check_unrecorded(tensor: Tensor) -> None:
    """Raise for a result of autograd, whose gradient would miss the projection.

    A view of a leaf is no result: writing to it changes the leaf.
    """
    base = tensor._base
    if tensor.grad_fn is not None and not (base is not None and base.is_leaf):
        remedy = "call so.polar(x), which has the derivative, or project x.detach()"
        given = f"a result of {tensor.grad_fn.name()}"
        raise ValueError(fail("x", "be no tensor that autograd has computed", given, remedy))


def to_nearest_(tensor: Tensor, reading: Stiefel, name: str) -> None:
    """Replace every matrix of a tensor that is off the manifold by the nearest point."""
    _write(tensor, nearest(gathered(tensor.detach()), reading, name, tells=True))


@torch.no_grad()
def _write(tensor: Tensor, point: Tensor | None) -> None:
    if point is not None:
        tensor.copy_(replicated(point, tensor.device_mesh) if is_sharded(tensor) else point)


# ---- the records -------------------------------------------------------------------------------


def readings(model: nn.Module) -> dict[str, tuple[nn.Parameter, Stiefel | None]]:
    """Return every parameter once, under its first name, with its reading or None.

    A record wins over a tag; a tag without record counts.
    """
    check_module("model", model)
    recorded: dict[int, tuple[str, Stiefel]] = {}
    for prefix, module in model.named_modules():
        for leaf, reading in records_of(module).items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            parameter = module._parameters.get(leaf)
            if parameter is None:
                wanted = "still be a parameter: it is constrained"
                remedy = "undo what replaced it (a parametrization, pruning) and use only one"
                if getattr(module._parameters, "is_flat", False):
                    raise ValueError(FLAT.format(name))
                raise ValueError(fail(name, wanted, "none of that name", remedy))
            reading.check(parameter.shape, name)
            other, earlier = recorded.setdefault(id(parameter), (name, reading))
            if earlier != reading:
                wanted = "be constrained alike: they are one tied parameter"
                raise ValueError(fail(f"{other} and {name}", wanted, f"{earlier} and {reading}"))
    return {
        name: (p, recorded[id(p)][1] if id(p) in recorded else _tag_of(p, name))
        for name, p in model.named_parameters()
    }


def _tag_of(parameter: nn.Parameter, name: str) -> Stiefel | None:
    """Return the tag of a parameter, None for what is geoopt's and on no Stiefel manifold."""
    return None if is_others(parameter) else manifold_of(parameter, name)


def retag(model: ModuleT) -> ModuleT:
    """Restore the tag of every parameter that :func:`constrain` recorded; return the model.

    Needed where torch has replaced parameters; values are not touched. Call it before the
    optimizer is built, since an optimizer holds the parameters themselves.

    Args:
        model: A model whose weights :func:`constrain` has constrained.

    Returns: The model.
    Raises:
        ValueError: if a record no longer fits its parameter, or two disagree about a tied one.
        TypeError: if ``model`` is not a module.
    """
    for parameter, reading in readings(model).values():
        if reading is not None:
            tag(parameter, reading)
    note_module(model)
    for module in model.modules():
        if records_of(module):
            watch(module)
    return model


def param_groups(
    model: nn.Module,
    *,
    stiefel: Mapping[str, Any] | None = None,
    plain: Mapping[str, Any] | None = None,
    names: bool = False,
    **common: Any,
) -> list[dict[str, Any]]:
    """Return parameter groups of ``model`` for any optimizer of this package; calls :func:`retag`.

    One group holds the plain parameters, and one each those with the same reading, which the group
    carries under the key ``"stiefel"``. Tied parameters appear once, frozen ones too, as in
    ``model.parameters()``. Rows that a reading leaves plain follow the group of their weight: give
    it, too, the ``weight_decay`` that they need. A parameter of the plain group that is constrained
    later stays orthonormal from then on; where nothing is constrained yet, this warns. What
    geoopt keeps on another manifold, as :func:`from_geoopt` leaves it, is in no group.

    Args:
        model: The model.
        stiefel: Options of the constrained groups, such as ``{"lr": 1e-2}``. Default: none. The
            optimizer refuses a misspelled option; other keys that it does not know stay there.
        plain: Options of the plain group. Default: none.
        names: Give ``(name, parameter)`` pairs, as ``model.named_parameters()`` does. Default: no.
        common: Options of all groups; ``stiefel`` and ``plain`` override them.

    Returns: The groups that are not empty, the plain one first.
    Raises:
        ValueError: as :func:`retag`, or if an option is called ``params`` or ``stiefel``.
        TypeError: if ``model`` is not a module, or options are no dict.
    """
    check_flag("names", names)
    options = {"common": common, "stiefel": stiefel or {}, "plain": plain or {}}
    for kind, mapping in options.items():
        if not isinstance(mapping, Mapping):
            raise TypeError(fail(kind, "be a dict of options", repr(mapping)))
        if taken := sorted({"params", "stiefel"} & set(mapping)):
            raise ValueError(fail(kind, f"not set {taken[0]!r}", repr(mapping[taken[0]])))
    retag(model)
    members: dict[Stiefel | None, list[Any]] = {None: []}
    for name, (parameter, reading) in readings(model).items():
        if is_others(parameter):
            continue
        members.setdefault(reading, []).append((name, parameter) if names else parameter)
    for module in model.modules():
        if records_of(module):
            module.__dict__[GROUPED] = True
    if not mark_maps(model) and len(members) == 1:
        warnings.warn(NOTHING_CONSTRAINED, stacklevel=2)
    groups = []
    for reading, params in members.items():
        if params:
            mine = options["plain" if reading is None else "stiefel"]
            key = None if reading is None else reading.as_dict()
            groups.append({"params": params, **common, **mine, "stiefel": key})
    return groups
