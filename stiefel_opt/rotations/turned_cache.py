"""A cache of transformers whose keys and values have few bits; imported where it is used."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.errors import check_integer, fail, imported
from stiefel_opt.rotations.hadamard_matrices import hadamard_factors, largest_hadamard

_caches = imported("transformers.cache_utils", "'transformers>=4.56'")
BITS: Final = (2, 4, 8)  # codes of them fill a byte
FITS: Final = 3  # of a grid to its row
SUM_AND_DIFFERENCE: Final = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
Codes = tuple[Tensor, Tensor, Tensor]  # packed integers, middle and step of each row's grid


class TurnedCache(_caches.Cache):  # type: ignore[misc, name-defined]
    r"""Key and value cache of few bits, rounded in the basis of a Hadamard matrix.

    .. math:: k \approx (m + s\,q)\,H^\top D, \qquad q = \mathrm{round}((k D^{-1} H - m) / s)

    for each token and head, q signed integers of ``bits`` bits, m and s the middle and the step of
    its grid, fitted by least squares; values alike. H spreads the loud channels that keys have. D
    is the square root of each channel's root mean square over the first tokens that are rounded:
    the scale for which the sum of the channels' errors is least. The model needs no hooks and no
    folding. A token is rounded once, when ``residual_length`` newer ones have come.

    Args:
        config: The config of a decoder, ``model.config``. Layers with a sliding window beside
            others with full attention keep their window as it is.
        bits: 2, 4 or 8. Default: 4.
        residual_length: So many latest tokens stay unrounded, and up to a quarter more. Default:
            128.

    Raises:
        TypeError: for a ``config`` that is none.
        ValueError: for bits out of range; for layers of other kinds (a state or a latent in place
            of keys and values, windows only), and heads without a Hadamard matrix of their size,
            each by name, here or at the first token; for values that are a view of the keys.
        ImportError: without transformers.
    Note: A token takes ``h bits / 8 + 2 b`` bytes for each head of keys or values of size h, b
        those of a number of the model's dtype. A step turns all rounded tokens back, by a sum, a
        difference and two products of h/2 x h/2 for each.
    Reference: Ashkboos et al., QuaRot (NeurIPS 2024), for Hadamard matrices at caches.

    Example:
        >>> cache = rotations.TurnedCache(model.config)
        >>> model.generate(ids, past_key_values=cache)
    """

    turns_keys = True  # a model with R3 leaves it to the cache

    def __init__(self, config: Any, bits: int = 4, residual_length: int = 128) -> None:
        if not hasattr(config, "get_text_config"):
            wanted, given = "be the config of a decoder", type(config).__name__
            raise TypeError(fail("config", wanted, given, "pass model.config"))
        if type(bits) is not int or bits not in BITS:
            raise ValueError(fail("bits", f"be one of {list(BITS)}", repr(bits)))
        check_integer("residual_length", residual_length, 0)
        layers = list(_caches.DynamicCache(config=config).layers)
        sliding = getattr(_caches, "DynamicSlidingWindowLayer", ())
        plain = [type(layer) is _caches.DynamicLayer for layer in layers]
        for layer in layers:
            if type(layer) is not _caches.DynamicLayer and not isinstance(layer, sliding):
                wanted = "have keys and values in every layer"
                raise ValueError(fail("config", wanted, type(layer).__name__, "take DynamicCache"))
        if not any(plain):
            given = "sliding windows only" if layers else "no layers"
            remedy = "take DynamicCache: a window is short"
            raise ValueError(fail("config", "have layers of full attention", given, remedy))
        size = getattr(config.get_text_config(decoder=True), "head_dim", None)
        if size is not None:
            _check_size("config.head_dim", size)
        turned = (
            TurnedLayer(bits, residual_length) if is_plain else layer
            for is_plain, layer in zip(plain, layers, strict=True)
        )
        super().__init__(layers=list(turned))


class TurnedLayer(_caches.DynamicLayer):  # type: ignore[misc, name-defined]
    """Keys and values of one layer: codes of the older tokens, the latest ones as they are.

    ``keys`` and ``values`` hold the latest ones, ``(batch, heads, tokens, size)``.
    """

    def __init__(self, bits: int, residual_length: int) -> None:
        super().__init__()
        self.bits, self.residual_length = bits, residual_length
        self.codes: list[Codes | None] = [None, None]  # of keys and of values
        self.scales: list[Tensor] = []  # of the channels of both, (heads, 1, size)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; return all keys and values, the new ones not rounded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            _check_states(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        pairs = ((self.keys, key_states), (self.values, value_states))
        latest = [torch.cat(pair, -2) for pair in pairs]
        whole = [self._with_older(place, recent) for place, recent in enumerate(latest)]
        due = latest[0].size(-2) - self.residual_length
        if due > self.residual_length // 4:  # several at once: an update costs less
            self.scales = self.scales or [_scale(recent) for recent in latest]
            for place, recent in enumerate(latest):
                self._append(place, self._rounded(place, recent[..., :due, :]))
                latest[place] = recent[..., due:, :].clone()
        self.keys, self.values = latest
        return whole[0], whole[1]

    def get_seq_length(self) -> int:
        """The number of tokens, rounded or not."""
        codes = self.codes[0]
        recent = self.keys.size(-2) if self.is_initialized else 0
        return recent + (0 if codes is None else codes[0].size(-2))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, or all beyond a positive number."""
        length = self.get_seq_length()
        keep = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        if not self.is_initialized or keep >= length:
            return
        older = length - self.keys.size(-2)
        self.keys, self.values = (
            each[..., : max(keep - older, 0), :] for each in (self.keys, self.values)
        )
        self._change(lambda part: part[..., : max(keep, 0), :])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these members of the batch."""
        if self.is_initialized:
            self.keys, self.values = (
                each.index_select(0, indices.to(each.device)) for each in (self.keys, self.values)
            )
            self._change(lambda part: part.index_select(0, indices.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each member of the batch."""
        if self.is_initialized:
            self.keys, self.values = (
                each.repeat_interleave(repeats, 0) for each in (self.keys, self.values)
            )
            self._change(lambda part: part.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forget all tokens."""
        self.codes, self.scales, self.is_initialized = [None, None], [], False
        self.keys = self.values = None  # type: ignore[assignment]

    def offload(self) -> None:
        """Move everything to the CPU."""
        super().offload()
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move everything back."""
        super().prefetch()
        self._move(self.device)

    # ---- codes -----------------------------------------------------------------------------------

    def _move(self, device: torch.device) -> None:
        self._change(lambda part: part.to(device, non_blocking=True))
        self.scales = [scale.to(device, non_blocking=True) for scale in self.scales]

    def _change(self, change: Any) -> None:
        self.codes = [
            None if codes is None else tuple(change(part) for part in codes) for codes in self.codes
        ]

    def _append(self, place: int, new: Codes) -> None:
        codes = self.codes[place]
        if codes is not None:
            new = tuple(  # type: ignore[assignment]
                torch.cat(pair, -2) for pair in zip(codes, new, strict=True)
            )
        self.codes[place] = new

    def _with_older(self, place: int, recent: Tensor) -> Tensor:
        """Return the rounded tokens, turned back, and the recent ones behind them."""
        codes = self.codes[place]
        if codes is None:
            return recent
        older = codes[0].size(-2)
        whole = recent.new_empty(*recent.shape[:-2], older + recent.size(-2), recent.size(-1))
        self._restore(place, codes, whole[..., :older, :])
        whole[..., older:, :] = recent
        return whole

    @torch.no_grad()
    def _rounded(self, place: int, x: Tensor) -> Codes:
        turned = (x.float() / self.scales[place].float()) @ matrix_of(x.size(-1), x.device)
        return rounded_rows(turned, self.bits, x.dtype)

    @torch.no_grad()
    def _restore(self, place: int, codes: Codes, out: Tensor) -> None:
        """Write what ``codes`` stand for; H = H_2 x H_m, the first factor on integers."""
        packed, middle, step = codes
        left, right = levels_of(packed, self.bits)
        core = _core(out.size(-1), out.dtype, out.device)
        y = out.new_empty(*left.shape[:-1], 2, left.size(-1))
        is_split = len(core) == left.size(-1)
        y[..., 0, :] = left + right if is_split else left
        y[..., 1, :] = left - right if is_split else right
        y = (y.view(*y.shape[:-2], -1, len(core)) @ core).view(out.shape)
        torch.mul(y, step, out=out)
        out[..., :1] += middle * math.sqrt(out.size(-1))  # a row of ones times H: its first row
        out *= self.scales[place]


def rounded_rows(y: Tensor, bits: int, dtype: torch.dtype, fits: int = FITS) -> Codes:
    """Round each row on a grid from its least to its largest entry, refined by least squares."""
    half = 2 ** (bits - 1)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    tiny = torch.finfo(dtype).tiny
    step = ((high - low) / (2 * half - 1)).clamp_min(tiny)
    middle = low + half * step
    for _ in range(fits):
        levels = ((y - middle) / step).round_().clamp_(-half, half - 1)
        mean = levels.mean(-1, keepdim=True)
        levels -= mean
        squares = levels.square().sum(-1, keepdim=True).clamp_min(tiny)
        step = ((levels * y).sum(-1, keepdim=True) / squares).clamp_min(tiny)
        middle = y.mean(-1, keepdim=True) - step * mean
    middle, step = middle.to(dtype), step.to(dtype)
    levels = ((y - middle.float()) / step.float()).round_().clamp_(-half, half - 1)
    pieces = (levels + half).to(torch.uint8).chunk(8 // bits, -1)
    packed = pieces[0].clone()
    for number, piece in enumerate(pieces[1:], 1):
        packed |= piece << (number * bits)
    return packed, middle, step


def levels_of(packed: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return both halves of the integers of each row, signed."""
    half = 2 ** (bits - 1)
    if bits == 8:
        left, right = (packed.short() - half).chunk(2, -1)
        return left, right
    codes = packed.view(torch.int8)
    pieces = [((codes >> shift) & (2 * half - 1)) - half for shift in range(0, 8, bits)]
    if bits == 2:
        return torch.cat(pieces[:2], -1), torch.cat(pieces[2:], -1)
    return pieces[0], pieces[1]


@torch.no_grad()
def _scale(x: Tensor) -> Tensor:
    """Root of each channel's root mean square, with one token of the mean over channels."""
    squares = x.float().square()
    power = squares.sum((0, -2)) + squares.mean((0, -2, -1))[..., None]
    count = x.size(0) * x.size(-2) + 1
    return (power / count).clamp_min(torch.finfo(x.dtype).tiny).pow(0.25).to(x.dtype)[:, None]


@functools.lru_cache(maxsize=32)
def matrix_of(size: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix of a head, orthogonal, with a first row of equal entries."""
    whole = torch.ones(1, 1, dtype=torch.float64)
    factors = hadamard_factors(_core_size(size))
    for factor in (*[SUM_AND_DIFFERENCE] * (_core_size(size) < size), *factors):
        whole = torch.kron(whole, factor)
    return (whole * whole[0].sign()).to(device, torch.float32)


@functools.lru_cache(maxsize=32)
def _core(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what turns a head back, behind the sum and difference of its halves if it is half."""
    core = _core_size(size)
    whole = matrix_of(size, device)[:core, :core].double()
    return whole.mT.to(dtype).contiguous()


def _core_size(size: int) -> int:
    return size // 2 if largest_hadamard(size // 2) == size // 2 else size


def _check_size(name: str, size: int) -> None:
    packs = size % 4 == 0
    if largest_hadamard(size) != size or not packs:
        remedy = "take DynamicCache"
        raise ValueError(fail(name, "be a size with a Hadamard matrix", size, remedy))


def _check_states(keys: Tensor, values: Tensor) -> None:
    """Raise at the first tokens for what no config says."""
    for name, states in (("keys", keys), ("values", values)):
        if states.ndim != 4 or not states.is_floating_point():
            wanted = "be (batch, heads, tokens, size)"
            raise ValueError(fail(name, wanted, states, "take DynamicCache"))
        _check_size(f"size of the heads of {name}", states.size(-1))
    if keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
        same = keys.data_ptr() == values.data_ptr() and math.prod(values.shape) > 0
        if same:
            given = "values that are a view of the keys"
            raise ValueError(fail("values", "be a tensor of their own", given, "take DynamicCache"))
