"""A cache of transformers whose keys and values have few bits; imported where it is used."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.errors import check_choice, check_integer, fail, imported
from stiefel_opt.rotations.hadamard_matrices import hadamard_factors, largest_hadamard

_caches = imported("transformers.cache_utils", "'transformers>=4.56'")
BITS: Final = (2, 4, 8)  # codes of them fill a byte
Codes = tuple[Tensor, Tensor, Tensor]  # packed codes, least entry and step of each row


class TurnedCache(_caches.Cache):  # type: ignore[misc, name-defined]
    r"""Key and value cache of few bits, rounded in the basis of a Hadamard matrix.

    .. math:: k \approx (l + s\,q)\,H^\top, \qquad q = \mathrm{round}((k H - l) / s)

    for each token and head, q of ``bits`` bits, l and s the least entry of k H and the step of its
    grid; values alike. H spreads the loud channels that keys have; the model needs no hooks and no
    folding. A token is rounded once, when ``residual_length`` newer ones have come.

    Args:
        config: The config of a decoder, ``model.config``. Layers with a sliding window beside
            others with full attention keep their window as it is.
        bits: 2, 4 or 8. Default: 4.
        residual_length: So many latest tokens stay unrounded, and up to a quarter more. Default:
            128.

    Raises:
        ValueError: for bits out of range; for layers of other kinds (a state or a latent in place
            of keys and values, windows only), and heads without a Hadamard matrix of their size,
            each by name, here or at the first token; for values that are a view of the keys.
        ImportError: without transformers.
    Note: A token takes ``h bits / 8 + 2 b`` bytes for each head of keys or values of size h, b
        those of a number of the model's dtype. A step turns all rounded tokens back, by a product
        of h x h for each.
    Reference: Ashkboos et al., QuaRot (NeurIPS 2024), for Hadamard matrices at caches.

    Example:
        >>> cache = rotations.TurnedCache(model.config)
        >>> model.generate(ids, past_key_values=cache)
    """

    turns_keys = True  # a model with R3 leaves it to the cache

    def __init__(self, config: Any, bits: int = 4, residual_length: int = 128) -> None:
        check_choice("bits", str(bits), [str(each) for each in BITS])
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

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; return all keys and values, the new ones not rounded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            _check_states(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        whole, latest = [], []
        for place, (kept, new) in enumerate(((self.keys, key_states), (self.values, value_states))):
            recent = torch.cat((kept, new), -2)
            codes = self.codes[place]
            older = () if codes is None else (self._unrounded(codes, new),)
            whole.append(torch.cat((*older, recent), -2) if older else recent)
            due = recent.size(-2) - self.residual_length
            if due > self.residual_length // 4:  # several at once: an update costs less
                self._append(place, self._rounded(recent[..., :due, :]))
                recent = recent[..., due:, :].clone()
            latest.append(recent)
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
        self.codes, self.is_initialized = [None, None], False
        self.keys = self.values = None  # type: ignore[assignment]

    def offload(self) -> None:
        """Move everything to the CPU."""
        super().offload()
        self._change(lambda part: part.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back."""
        super().prefetch()
        self._change(lambda part: part.to(self.device, non_blocking=True))

    # ---- codes -----------------------------------------------------------------------------------

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

    def _rounded(self, x: Tensor) -> Codes:
        y = self._turn(x.float())
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        step = ((high - low) / (2**self.bits - 1)).to(x.dtype)
        step = step.clamp_min(torch.finfo(x.dtype).tiny)
        low = low.to(x.dtype)
        levels = ((y - low.float()) / step.float()).round_().clamp_(0, 2**self.bits - 1)
        pieces = levels.to(torch.uint8).chunk(8 // self.bits, -1)
        packed = pieces[0].clone()
        for number, piece in enumerate(pieces[1:], 1):
            packed |= piece << (number * self.bits)
        return packed, low, step

    def _unrounded(self, codes: Codes, like: Tensor) -> Tensor:
        packed, low, step = codes
        y = like.new_empty(*packed.shape[:-1], like.size(-1))
        for number, piece in enumerate(y.chunk(8 // self.bits, -1)):
            piece.copy_((packed >> (number * self.bits)) & (2**self.bits - 1))
        return self._turn(y.mul_(step).add_(low), back=True)

    def _turn(self, x: Tensor, *, back: bool = False) -> Tensor:
        matrix = _matrix(x.size(-1), x.dtype, x.device)
        return x @ (matrix.mT if back else matrix)


@functools.lru_cache(maxsize=32)
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the Hadamard matrix of a head, orthogonal."""
    whole = torch.ones(1, 1, dtype=torch.float64)
    for factor in hadamard_factors(size):
        whole = torch.kron(whole, factor)
    return whole.to(device, dtype)


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
