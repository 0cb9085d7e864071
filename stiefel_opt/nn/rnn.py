"""The simple recurrent network with an orthogonal transition."""

from __future__ import annotations

import math
import warnings
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_counts, check_flags, check_range, fail
from stiefel_opt.nn._transition import (
    check_transition,
    draw_uniform,
    factors_or_matrix,
    project_on_load,
    set_transition,
)
from stiefel_opt.nn.recurrence import COMPLEX_NONLINEARITIES, NONLINEARITIES, rollout
from stiefel_opt.numerics import no_autocast


class OrthogonalRNN(nn.Module):
    r"""``nn.RNN`` with an orthogonal transition: the state neither explodes nor fades linearly.

    .. math::
        h_t = \sigma(W_{ih} x_t + b_{ih} + Q h_{t-1} + b_{hh}), \qquad Q^\top Q = I

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device,
            dtype: As in ``nn.RNN``.
        nonlinearity: ``"tanh"``, ``"relu"``, ``"abs"`` (keeps the norm exactly) or ``"modrelu"``,
            sign(z) relu(|z| + b) with a learned b for each unit.
        transition: How Q is kept orthogonal: ``"tagged"`` for an optimizer of this package; the
            name of a map of :func:`stiefel_opt.orthogonal` for any optimizer; None: unconstrained.
        start: Initialisation of Q: ``"henaff"`` or ``"helfrich"``, random rotations of planes, or
            None: uniform among the orthogonal matrices. The other weights are initialised as in
            ``nn.RNN``. For memory over many steps take ``nonlinearity="modrelu"`` and
            ``start="henaff"``: with the defaults, those of ``nn.RNN``, tanh forgets.
        generator: Source of the initial Q. Default: torch's global one.
        options: Of the transition, such as ``reflections=128`` for ``"cwy"``.

    Raises:
        ValueError: for unknown names, sizes below 1, and input that does not fit.
        TypeError: for unknown options, or a dtype that the transition does not have.

    Note:
        Parameters are called as in ``nn.RNN``, with ``threshold_l0`` and so on for modrelu. The
        products of the input are formed for all steps at once, and the backward is written by hand,
        see :func:`stiefel_opt.nn.rollout`. With ``"cwy"`` and L < N reflections a step
        multiplies by U and S^-1 U' (4 N L flops a row) and Q is never formed; otherwise Q is formed
        once a call. Packed sequences are padded, so their cost is that of the longest. Under
        autocast, and for weights in half precision, the recurrence runs in float32. A complex
        ``dtype``, as "urnn" and "eurnn" need, takes tanh and modrelu and leaves the backward to
        autograd. A state_dict of ``nn.RNN`` loads for "tagged", as its nearest point, and None.

    Reference:
        Likhosherstov et al. (AISTATS 2021), section 3.1; Helfrich, Willmott & Ye (ICML 2018).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        transition: str | None = "cwy",
        start: str | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_counts(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        check_flags(bias=bias, batch_first=batch_first, bidirectional=bidirectional)
        check_choice("nonlinearity", nonlinearity, NONLINEARITIES)
        check_transition(transition)
        is_complex = (dtype or torch.get_default_dtype()).is_complex
        if is_complex and nonlinearity not in COMPLEX_NONLINEARITIES:
            wanted = f"be {' or '.join(COMPLEX_NONLINEARITIES)} for complex numbers"
            raise ValueError(fail("nonlinearity", wanted, repr(nonlinearity)))
        check_range("dropout", dropout, 0.0, math.nextafter(1.0, 2.0))
        if dropout and num_layers == 1:
            warnings.warn("dropout acts between layers, and there is only one", stacklevel=2)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.nonlinearity, self.transition = nonlinearity, transition
        self.bias, self.batch_first, self.bidirectional = bias, batch_first, bidirectional
        self.dropout = float(dropout)
        for layer in range(num_layers):
            width = hidden_size * (1 + bidirectional) if layer else input_size
            for suffix in self._suffixes(layer):
                self._build(width, suffix, generator, device=device, dtype=dtype)
                name = f"weight_hh{suffix}"
                set_transition(self, name, transition, start=start, generator=generator, **options)
        project_on_load(self)

    def _build(
        self, width: int, suffix: str, generator: torch.Generator | None, **layout: Any
    ) -> None:
        """Create the parameters of one direction of one layer, as nn.RNN but for Q."""
        size, bound = self.hidden_size, self.hidden_size**-0.5

        def uniform(*shape: int) -> nn.Parameter:
            value = torch.empty(shape, **layout)
            (torch.view_as_real(value) if value.is_complex() else value).uniform_(-bound, bound)
            return nn.Parameter(value)

        setattr(self, f"weight_ih{suffix}", uniform(size, width))
        transition = uniform(size, size)
        draw_uniform(transition, generator)
        setattr(self, f"weight_hh{suffix}", transition)
        if self.bias:
            setattr(self, f"bias_ih{suffix}", uniform(size))
            setattr(self, f"bias_hh{suffix}", uniform(size))
        if self.nonlinearity == "modrelu":
            threshold = torch.empty_like(transition[0].real).uniform_(-0.01, 0.01)
            setattr(self, f"threshold{suffix}", nn.Parameter(threshold))

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: 2 if self.bidirectional else 1]

    @overload
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None
    ) -> tuple[PackedSequence, Tensor]: ...
    @override
    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Return the outputs of the last layer and the last hidden state of every layer.

        Args:
            input: ``(T, batch, input_size)``, ``(batch, T, input_size)`` with ``batch_first``,
                ``(T, input_size)`` without batch, or a packed sequence.
            hx: First hidden state, ``(directions * num_layers, batch, hidden_size)`` or without
                batch. Default: zero.

        Returns:
            Outputs like ``input`` with ``directions * hidden_size`` columns, and the last hidden
            states shaped as ``hx``.
        """
        if isinstance(input, PackedSequence):
            # A graph would break at the sizes of the sequences, and dynamo loses them there.
            packed: Any = torch.compiler.disable(self._packed)  # type: ignore[no-untyped-call]
            result: tuple[PackedSequence, Tensor] = packed(input, hx)
            return result
        if input.ndim not in (2, 3) or input.size(-1) != self.input_size or 0 in input.shape:
            condition = f"have 2 or 3 dimensions, none of them 0, the last {self.input_size}"
            raise ValueError(fail("input", condition, input))
        if input.ndim == 2:
            initial = self._initial_state(input, hx, ()).unsqueeze(1)
            outputs, last = self._layers(input.unsqueeze(1), initial, None)
            return outputs.squeeze(1), last.squeeze(1)
        steps = input.transpose(0, 1) if self.batch_first else input
        initial = self._initial_state(input, hx, (steps.size(1),))
        outputs, last = self._layers(steps, initial, None)
        return (outputs.transpose(0, 1) if self.batch_first else outputs), last

    def _packed(self, given: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        if given.data.size(-1) != self.input_size:
            condition = f"have {self.input_size} columns"
            raise ValueError(fail("input", condition, given.data))
        # Longest first, as the data are; the hidden states come and go in the caller's order.
        sizes, place = given.batch_sizes, given.data.device
        order = torch.arange(int(sizes[0]), device=sizes.device)  # on the CPU
        present = order < sizes.unsqueeze(-1)  # (T, batch)
        time, sequence = (index.to(place) for index in present.nonzero(as_tuple=True))
        steps = given.data.new_zeros(*present.shape, self.input_size)
        steps[time, sequence] = given.data
        initial = self._initial_state(given.data, hx, present.shape[1:])
        if hx is not None and given.sorted_indices is not None:
            initial = initial.index_select(1, given.sorted_indices)
        outputs, last = self._layers(steps, initial, present.sum(0).to(place))
        if given.unsorted_indices is not None:
            last = last.index_select(1, given.unsorted_indices)
        return given._replace(data=outputs[time, sequence]), last

    def _initial_state(self, given: Tensor, hx: Tensor | None, batch: tuple[int, ...]) -> Tensor:
        count = self.num_layers * (2 if self.bidirectional else 1)
        shape = (count, *batch, self.hidden_size)
        if hx is None:
            return torch.zeros(shape, dtype=given.dtype, device=given.device)
        if tuple(hx.shape) != shape:
            raise ValueError(fail("hx", f"have shape {shape}", hx))
        return hx

    def _layers(
        self, steps: Tensor, initial: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers on ``(T, batch, .)``; ``lengths`` says where padding begins."""
        dtype, last = steps.dtype, []
        states = iter(initial.unbind())
        for layer in range(self.num_layers):
            if layer and self.dropout:
                steps = nn.functional.dropout(steps, self.dropout, self.training)
            outputs = []
            for suffix in self._suffixes(layer):
                backwards = suffix.endswith("reverse")
                entering = _reversed(steps, lengths) if backwards else steps
                hidden = self._direction(entering, next(states), suffix)
                hidden = hidden if hidden.is_complex() else hidden.to(dtype)
                last.append(_last(hidden, lengths))
                outputs.append(_reversed(hidden, lengths) if backwards else hidden)
            steps = torch.cat(outputs, dim=-1) if self.bidirectional else outputs[0]
        return steps, torch.stack(last)

    def _direction(self, steps: Tensor, initial: Tensor, suffix: str) -> Tensor:
        bias = None
        if self.bias:
            bias = getattr(self, f"bias_ih{suffix}") + getattr(self, f"bias_hh{suffix}")
        weight = getattr(self, f"weight_ih{suffix}")
        steps = steps.to(weight.dtype) if weight.is_complex() else steps
        inputs = nn.functional.linear(steps, weight, bias)
        with no_autocast(steps):
            transition = factors_or_matrix(self, f"weight_hh{suffix}")
            one = transition if isinstance(transition, Tensor) else transition[0]
            dtype, real = one.dtype, one.real.dtype
            threshold = getattr(self, f"threshold{suffix}", None)
            return rollout(
                inputs.to(dtype),
                initial.to(dtype),
                transition,
                nonlinearity=self.nonlinearity,
                threshold=None if threshold is None else threshold.to(real),
            )

    def flatten_parameters(self) -> None:
        """Do nothing: for code that calls it on ``nn.RNN``."""

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, "
            f"nonlinearity={self.nonlinearity!r}, transition={self.transition!r}, "
            f"bias={self.bias}, batch_first={self.batch_first}, dropout={self.dropout}, "
            f"bidirectional={self.bidirectional}"
        )


def _reversed(steps: Tensor, lengths: Tensor | None) -> Tensor:
    """Return each sequence in reverse order; the padding stays at the end."""
    if lengths is None:
        return steps.flip(0)
    time = torch.arange(len(steps), device=steps.device).unsqueeze(-1)
    order = torch.where(time < lengths, lengths - 1 - time, time)
    return steps.gather(0, order.unsqueeze(-1).expand_as(steps))


def _last(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the hidden state after the last step of each sequence."""
    if lengths is None:
        return hidden[-1]
    return hidden[lengths - 1, torch.arange(len(lengths), device=hidden.device)]
