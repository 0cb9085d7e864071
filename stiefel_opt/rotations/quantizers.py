"""Fake quantisers in a rotated basis: the model runs as if it were quantised, no weight is changed.

The input x of a linear layer becomes Q(x R) R', with Q the rounding, so that the same weights serve
every rotation. A rounded number is x + s r, with s the step of the grid and r the distance to it in
steps; the gradient takes r as a constant, which is the straight-through
estimator with the one part that rotations can learn from: how far the entries spread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stiefel_opt.errors import check_flag, check_integer, fail, users_level
from stiefel_opt.numerics import widened
from stiefel_opt.rotations.attention import add_turn, remove_turn
from stiefel_opt.rotations.decoder import Decoder, Layer, Linear, check_sharing, state_of
from stiefel_opt.rotations.hadamard_matrices import rotate_fixed
from stiefel_opt.rotations.online import usable_decoder
from stiefel_opt.rotations.result import Rotations, check_rotations

FEW_BITS = 4  # of activations: R4 is needed


def fake_quantize(x: Tensor, bits: int, symmetric: bool = False) -> Tensor:
    r"""Round each row of ``x`` to a grid of :math:`2^b` levels over its own range.

    .. math:: x + s\,r, \quad r = \mathrm{round}(u) - u, \quad u = (x - \min x) / s

    with :math:`s = (\max x - \min x) / (2^b - 1)`, or, symmetric, :math:`u = x / s` and
    :math:`s = \max |x| / (2^{b - 1} - 1)`. The gradient takes r as a constant: straight through
    the rounding, but not through the step s, whose part tells a rotation to narrow the range.

    Each row of ``x``, ``(..., n)``, has a grid of its own, of at least 2 bits.
    """
    low, step = _grid(x, bits, symmetric)
    step = step.clamp_min(torch.finfo(x.dtype).tiny)
    with torch.no_grad():
        levels = (x - low) / step
        rest = levels.round().sub_(levels)
    return torch.addcmul(x, step, rest)


def noise_ratio(x: Tensor, bits: int, symmetric: bool = False) -> Tensor:
    r"""Return the mean over rows of :math:`s^2 / 12` over the mean square, s the step of the grid.

    What :func:`fake_quantize` is expected to add; no rotation changes the denominator.
    """
    _, step = _grid(x, bits, symmetric)
    power = x.detach().square().mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return (step.square() / (12 * power)).mean()


def _grid(x: Tensor, bits: int, symmetric: bool) -> tuple[Tensor | float, Tensor]:
    """Return where the grid of each row begins, and its step, ``(..., 1)``."""
    if symmetric:
        return 0.0, x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    # not aminmax, which has no derivative in torch 2.11
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    return low, (high - low) / (2**bits - 1)


def quantized(
    model: nn.Module,
    *,
    rotations: Rotations | None = None,
    activation_bits: int | None = 4,
    kv_bits: int | None = None,
    weight_bits: int | None = None,
    weight_group: int | None = None,
    symmetric: bool = False,
) -> contextlib.AbstractContextManager[nn.Module]:
    """Context: ``model`` runs as if it were quantised. Nothing is changed.

    Rounded are, token by token, the inputs of every linear layer but the head's; with ``kv_bits``
    keys and values, head by head; with ``weight_bits`` the weights of these layers, to nearest on
    symmetric grids. Embeddings, norms and attention scores stay.

    Args:
        model: A decoder that :func:`prepare_` knows, without experts: as it was loaded, or later.
        rotations: In whose basis is rounded, for a prepared model, or for any if they have no R1.
            Default: as the model stands.
        activation_bits, kv_bits, weight_bits: From 2 to 16; None does not round.
        weight_group: So many neighbouring inputs of an output have a grid of their own, as 32 in
            torchao and llama.cpp. Default: one grid for each output.
        symmetric: Whether the grids of activations, keys and values are symmetric about zero.

    Yields: The model.
    Raises:
        ValueError, TypeError: for bits out of range, another family, rotations of another model,
            or rotations for a model that is not prepared or is folded already; for a folded model
            without its online rotations; for a ``weight_group`` that does not divide every layer's
            inputs.
    Warns: for activations of 4 bits or less of a rotated model without R4.
    Note: Gradients pass the rounding as :func:`stiefel_opt.rotations.learn` has it.
    """
    bits = {"activation_bits": activation_bits, "kv_bits": kv_bits, "weight_bits": weight_bits}
    options = {**bits, "weight_group": weight_group, "symmetric": symmetric}
    decoder = usable_decoder(model)
    quantizers = quantizers_of(decoder, "rotations", rotations, **options)
    warn_without_r4(decoder, rotations, activation_bits)

    @contextlib.contextmanager
    def installed() -> Iterator[nn.Module]:
        with quantizers.installed():
            yield model

    return installed()


def warn_without_r4(
    decoder: Decoder, rotations: Rotations | None, activation_bits: int | None
) -> None:
    """Warn where a rotated model rounds the inputs of ``down_proj`` to few bits as they are."""
    state = state_of(decoder.model)
    is_folded = state.get("state") == "folded"
    online = state["online"] if is_folded else getattr(rotations, "online", ("R4",))
    if activation_bits is not None and activation_bits <= FEW_BITS and "R4" not in online:
        remedy = "fold the original with" if is_folded else "take"
        warnings.warn(
            f"activation_bits={activation_bits} without R4: the inputs of down_proj keep their "
            f"outliers, and little of the model is left; {remedy} rotations with online=('R4',), "
            "or round to 8 bits",
            stacklevel=users_level(),
        )


def quantizers_of(
    decoder: Decoder, name: str, rotations: Rotations | None, **options: Any
) -> Quantizers:
    """Check everything that :class:`Quantizers` takes, and make them."""
    for bits in ("activation_bits", "kv_bits", "weight_bits"):
        if options[bits] is not None:
            check_integer(bits, options[bits], 2, 16)
    check_flag("symmetric", options["symmetric"])
    _check_places(decoder, options["kv_bits"])
    if options["weight_group"] is not None:
        _check_weight_group(decoder, options["weight_group"], options["weight_bits"])
    if rotations is not None:
        check_rotations(name, rotations, decoder)
        check_prepared(decoder, rotations)
    return Quantizers(decoder, rotations, **options)


def _check_places(decoder: Decoder, kv_bits: object) -> None:
    """Raise where the model has no module whose inputs, weights or values could be rounded."""
    experts = [linear.name for linear in decoder.linears() if linear.is_parameter]
    if experts:
        remedy = "fold rotations.hadamard(model), and round it by a tool that knows experts"
        wanted = "have a module for each linear layer to be rounded"
        raise ValueError(fail("model", wanted, f"experts in one parameter, {experts[0]}", remedy))
    if kv_bits is not None and not decoder.has_heads:
        given = f"a {type(decoder.model).__name__} whose description names no values"
        raise ValueError(fail("kv_bits", "be None for keys and values in one layer", given))


def _check_weight_group(decoder: Decoder, group: object, weight_bits: object) -> None:
    """Raise unless groups of that many inputs fill every layer."""
    size = check_integer("weight_group", group, 2)
    if weight_bits is None:
        raise ValueError(fail("weight_group", "be None where weight_bits is", size))
    for linear in decoder.linears():
        inputs = linear.weight.size(-1)
        if linear.name != decoder.description.head and inputs % size:
            wanted = f"divide the {inputs} inputs of {linear.name}"
            raise ValueError(fail("weight_group", wanted, size))


def check_prepared(decoder: Decoder, rotations: Rotations | None = None) -> None:
    """Raise unless the model has gone through ``prepare_`` and not through ``fold_``.

    Where ``rotations`` have no R1, the norms may have gains.
    """
    state = state_of(decoder.model).get("state", "as it was loaded")
    if state == "as it was loaded" and rotations is not None and rotations.residual is None:
        check_sharing(decoder)
    elif state != "prepared":
        untouched = state == "as it was loaded"
        remedy = "call rotations.prepare_(model)" if untouched else "load the original"
        raise ValueError(fail("model", "be prepared", f"one that is {state}", remedy))


# ---- the places of a decoder ---------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Quantizers:
    """Fake quantisers of a decoder with the options of :func:`quantized`.

    With ``recompute`` layers keep only their inputs for the backward pass.
    """

    decoder: Decoder
    rotations: Rotations | None
    activation_bits: int | None
    kv_bits: int | None
    weight_bits: int | None
    weight_group: int | None
    symmetric: bool
    recompute: bool = False
    measure: Callable[[Tensor], None] | None = None  # of noise, instead of rounding
    counted: Tensor | None = None  # mask (batch, tokens) of the rows that are measured
    enabled: bool = True

    def __post_init__(self) -> None:
        given = self.rotations
        self.residual = None if given is None else given.residual
        self.heads: Sequence[Tensor | None]
        none = [None] * len(self.decoder.layers)
        self.heads = none if given is None or not given.heads else given.heads
        self.online = () if given is None else given.online

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Context: nothing is rounded."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[Quantizers]:
        """Context: the hooks are installed."""
        with contextlib.ExitStack() as stack:
            for number, layer in enumerate(self.decoder.layers):
                self._install(layer, self.heads[number], stack)
            if self.kv_bits is not None:
                add_turn(self.decoder, self._turn_keys)
                stack.callback(remove_turn, self.decoder, self._turn_keys)
            yield self

    def _install(self, layer: Layer, head: Tensor | None, stack: contextlib.ExitStack) -> None:
        bits = self.activation_bits

        def after_norm(_: nn.Module, __: Any, x: Tensor) -> Tensor:
            return self._round(x, bits, self.residual)

        def before(writer: Linear, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (self._round(inputs[0], bits, self._sides(layer, writer, head)[0]),)

        def after_value(_: nn.Module, __: Any, x: Tensor) -> Tensor:
            values = torch.unflatten(x, -1, (-1, self.decoder.head_size))
            return self._round(values, self.kv_bits, head).flatten(-2)

        handles = []
        if bits is not None:
            handles = [norm.module.register_forward_hook(after_norm) for norm in layer.norms]
            for writer in layer.writers:
                hook = functools.partial(before, writer)
                handles.append(writer.module.register_forward_pre_hook(hook))
        if self.kv_bits is not None and layer.value is not None:
            handles.append(layer.value.module.register_forward_hook(after_value))
        for handle in handles:
            stack.callback(handle.remove)
        for linear in layer.linears() if self.weight_bits is not None else ():
            sides = functools.partial(self._sides, layer, linear, head)
            rounded = functools.partial(self._linear, linear, sides)
            stack.enter_context(wrapped_forward(linear.module, rounded))
        if self.recompute:
            recomputed = functools.partial(checkpoint, use_reentrant=False)
            stack.enter_context(wrapped_forward(layer.module, recomputed))

    def _sides(
        self, layer: Layer, linear: Linear, head: Tensor | None
    ) -> tuple[Rotation, Rotation]:
        """Return what turns the inputs of a layer, and what turns its outputs."""
        if linear not in layer.writers:
            return self.residual, head if linear == layer.value else None
        if linear == layer.output:
            return head, self.residual
        fixed = rotate_fixed if linear == layer.down and "R4" in self.online else None
        return fixed, self.residual

    def _round(self, x: Tensor, bits: int | None, rotation: Rotation) -> Tensor:
        """Round the rows of ``x`` in the rotated basis."""
        if not self.enabled or bits is None:
            return x
        if self.measure is not None:
            self._measure(x, bits, rotation, self.symmetric, counted=self.counted)
            return x
        y = fake_quantize(turned(widened(x), rotation), bits, self.symmetric)
        return turned(y, rotation, back=True).to(x.dtype)

    def _measure(
        self,
        x: Tensor,
        bits: int,
        rotation: Rotation,
        symmetric: bool,
        *,
        outward: Rotation = None,
        group: int | None = None,
        counted: Tensor | None = None,
    ) -> None:
        """Pass the noise of rounding ``x`` to ``measure``, with a gradient for rotations only."""
        if self.measure is None or (not isinstance(rotation, Tensor) and outward is None):
            return  # fixed: nothing to learn
        rows = x.detach() if counted is None else x.detach()[counted]
        with torch.enable_grad():
            y = turned(widened(rows), rotation)
            y = y if outward is None else turned(y.mT, outward).mT
            y = y if group is None else torch.unflatten(y, -1, (-1, group))
            self.measure(noise_ratio(y, bits, symmetric))

    def _linear(
        self,
        linear: Linear,
        sides: Callable[[], tuple[Rotation, Rotation]],
        plain: Callable[[Tensor], Tensor],
        x: Tensor,
    ) -> Tensor:
        """The layer with its weight rounded, on a grid for each group, in the rotated basis."""
        bits, group = self.weight_bits, self.weight_group
        inward, outward = sides()
        if not self.enabled or bits is None:
            return plain(x)
        if self.measure is not None:
            self._measure(linear.weight, bits, inward, True, outward=outward, group=group)
            return plain(x)

        def run(x: Tensor) -> Tensor:
            weight = turned(widened(linear.weight), inward)
            weight = turned(weight.mT, outward).mT
            grouped = torch.unflatten(weight, -1, (-1, group or weight.size(-1)))
            weight = fake_quantize(grouped, bits, symmetric=True).flatten(-2)
            weight = turned(turned(weight.mT, outward, back=True).mT, inward, back=True)
            return functional.linear(x, weight.to(x.dtype), linear.bias)

        # Rounded weights are worked out again in the backward pass: a copy of one at a time.
        return checkpoint(run, x, use_reentrant=False) if torch.is_grad_enabled() else run(x)

    def _turn_keys(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Queries as they are, keys rounded head by head, turned by R3 if it is there."""
        fixed = rotate_fixed if "R3" in self.online else None
        return queries, self._round(keys, self.kv_bits, fixed)


Rotation = Tensor | Callable[..., Tensor] | None  # a matrix for one piece of a row, or fixed


def turned(x: Tensor, rotation: Rotation, *, back: bool = False) -> Tensor:
    """Multiply each piece of the rows of ``x``, as wide as ``rotation``, by it or its transpose."""
    if rotation is None:
        return x
    if not isinstance(rotation, Tensor):
        result: Tensor = rotation(x, back=back)
        return result
    matrix = rotation.to(x)
    matrix = matrix.mT if back else matrix
    size = len(matrix)
    if x.size(-1) == size:
        return x @ matrix
    return (x.reshape(*x.shape[:-1], -1, size) @ matrix).reshape(x.shape)


WRAPPERS = "_stiefel_wrappers"  # of a module: what runs around its own forward, outermost last


@contextlib.contextmanager
def wrapped_forward(module: nn.Module, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Context: ``module`` runs ``wrapper(forward, ...)``; several may end in any order."""
    if WRAPPERS not in module.__dict__:
        module.__dict__[WRAPPERS] = ([], module.__dict__.get("forward"))
    wrappers, own = module.__dict__[WRAPPERS]
    wrappers.append(wrapper)
    _wrap(module, wrappers, own)
    try:
        yield
    finally:
        wrappers.remove(wrapper)
        _wrap(module, wrappers, own)
        if not wrappers:
            del module.__dict__[WRAPPERS]


def _wrap(module: nn.Module, wrappers: Sequence[Callable[..., Any]], own: Any) -> None:
    module.__dict__.pop("forward", None)
    if own is not None:
        module.forward = own
    for wrapper in wrappers:
        module.forward = functools.partial(wrapper, module.forward)
