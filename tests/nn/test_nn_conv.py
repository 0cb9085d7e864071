"""ConvNERU: what it computes, and the bound of appendix B on its hidden images."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import in_turn
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.nn import ConvNERU

CHANNELS, HIDDEN = 2, 4

TRANSITIONS: dict[str, dict[str, Any]] = {
    name: {"transition": name} for name in ("tagged", "tcwy", "cwy", "matrix_exp", "cayley", "own")
}
every_transition = pytest.mark.parametrize("options", TRANSITIONS.values(), ids=TRANSITIONS)


def unit(side: int, **options: Any) -> ConvNERU:
    return ConvNERU(CHANNELS, HIDDEN, side, dtype=torch.float64, **options)


def kernel_matrix(module: ConvNERU) -> Tensor:
    """One row for each offset and input channel, one column for each output channel."""
    weight = module.hidden_conv.weight.detach()
    return weight.permute(2, 3, 1, 0).reshape(-1, module.hidden_channels)


def convolution(module: ConvNERU, images: Tensor) -> Tensor:
    return module.hidden_conv(images)


def operator_matrix(module: ConvNERU, height: int, width: int) -> Tensor:
    """The matrix of the zero-padded convolution on images of one size."""
    count = HIDDEN * height * width
    basis = torch.eye(count, dtype=torch.float64).view(count, HIDDEN, height, width)
    return convolution(module, basis).detach().view(count, count).mT


@pytest.mark.parametrize(("options", "side"), in_turn(TRANSITIONS.values(), [3, 5]))
def test_kernel_times_its_side_is_orthonormal(options, side):
    matrix = side * kernel_matrix(unit(side, **options))
    assert matrix.shape == (side**2 * HIDDEN, HIDDEN)
    identity = torch.eye(HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(matrix.mT @ matrix, identity, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "side", "size"),
    in_turn(TRANSITIONS.values(), [3, 5], [(6, 5), (3, 4), (1, 1)]),
)
def test_convolution_does_not_enlarge_images(options, side, size):
    """Appendix B: |K * G| <= |G| for every G, that is for the largest singular value."""
    matrix = operator_matrix(unit(side, **options), *size)
    assert float(torch.linalg.matrix_norm(matrix, ord=2)) <= 1.0 + 1e-12


def test_bound_is_attained_and_broken_without_the_constraint():
    """Equal weights at every offset turn a flat image into itself, away from the border."""
    module = unit(3, transition="tagged")
    with torch.no_grad():
        turn = torch.eye(HIDDEN, dtype=torch.float64) / 9
        module.hidden_conv.weight.copy_(turn[:, :, None, None].expand(-1, -1, 3, 3))
    assert so.orthonormality_error(module) < 1e-12
    images = torch.ones(1, HIDDEN, 9, 9, dtype=torch.float64)
    inside = convolution(module, images)[..., 1:-1, 1:-1]
    torch.testing.assert_close(inside, images[..., 1:-1, 1:-1])
    free = unit(3, transition=None)
    nn.init.xavier_uniform_(free.hidden_conv.weight)
    assert float(torch.linalg.matrix_norm(operator_matrix(free, 6, 6), ord=2)) > 1.1


@pytest.mark.parametrize(
    ("options", "nonlinearity"), in_turn(TRANSITIONS.values(), ["abs", "relu", "tanh"])
)
def test_state_and_gradient_do_not_grow(options, nonlinearity, generator):
    module = unit(3, nonlinearity=nonlinearity, bias=False, **options)
    first = torch.randn(2, HIDDEN, 6, 6, generator=generator, dtype=torch.float64)
    first.requires_grad_()
    outputs, last = module(torch.zeros(30, 2, CHANNELS, 6, 6, dtype=torch.float64), first)
    norms = torch.linalg.vector_norm(torch.cat([first[None], outputs]), dim=(-3, -2, -1))
    assert bool((norms[1:] <= norms[:-1] * (1 + 1e-12)).all())
    weights = torch.randn(last.shape, generator=generator, dtype=torch.float64)
    (back,) = torch.autograd.grad((last * weights).sum(), first)
    bound = torch.linalg.vector_norm(weights, dim=(-3, -2, -1)) * (1 + 1e-12)
    assert bool((torch.linalg.vector_norm(back, dim=(-3, -2, -1)) <= bound).all())


@every_transition
def test_equals_its_definition(options, generator):
    module = unit(3, **options)
    inputs = torch.randn(4, 2, CHANNELS, 5, 6, generator=generator, dtype=torch.float64)
    first = torch.randn(2, HIDDEN, 5, 6, generator=generator, dtype=torch.float64)
    hidden, expected = first, []
    for image in inputs:
        hidden = torch.relu(module.hidden_conv(hidden) + module.input_conv(image))
        expected.append(hidden)
    outputs, last = module(inputs, first)
    torch.testing.assert_close(outputs, torch.stack(expected))
    assert torch.equal(last, outputs[-1])
    assert torch.equal(module(inputs)[0], module(inputs, torch.zeros_like(first))[0])


def test_orders_of_dimensions(generator):
    module = unit(3, transition="tagged")
    inputs = torch.randn(4, 2, CHANNELS, 5, 6, generator=generator, dtype=torch.float64)
    first = torch.randn(2, HIDDEN, 5, 6, generator=generator, dtype=torch.float64)
    outputs, last = module(inputs, first)
    alone, alone_last = module(inputs[:, 1], first[1])
    torch.testing.assert_close((alone, alone_last), (outputs[:, 1], last[1]))
    module.batch_first = True
    turned, turned_last = module(inputs.transpose(0, 1), first)
    torch.testing.assert_close((turned.transpose(0, 1), turned_last), (outputs, last))


@pytest.mark.parametrize("options", [TRANSITIONS["tagged"], TRANSITIONS["own"]], ids=str)
def test_copies_checkpoints_and_the_generator(options):
    def module(seed: int) -> ConvNERU:
        return unit(3, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(module(1).hidden_conv.weight, module(1).hidden_conv.weight)
    assert not torch.allclose(module(1).hidden_conv.weight, module(2).hidden_conv.weight)
    other = module(2)
    other.load_state_dict(module(1).state_dict())
    assert torch.equal(other.hidden_conv.weight, module(1).hidden_conv.weight)
    assert torch.equal(copy.deepcopy(other).hidden_conv.weight, other.hidden_conv.weight)


def test_a_free_state_loads_as_its_nearest_point():
    module, free = unit(3, transition="tagged"), unit(3, transition=None)
    free.hidden_conv.reset_parameters()
    module.load_state_dict(free.state_dict())
    matrix = 3 * kernel_matrix(module)
    identity = torch.eye(HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(matrix.mT @ matrix, identity, rtol=0, atol=1e-12)


WRONG_OPTIONS = [
    ({"kernel_size": 4}, ValueError, "`kernel_size` must be odd, got 4"),
    ({"hidden_channels": 0}, ValueError, "`hidden_channels` must be a positive integer, got 0"),
    ({"nonlinearity": "modrelu"}, ValueError, "`nonlinearity` must be one of"),
    ({"bias": None}, TypeError, "`bias` must be True or False"),
    ({"scale": 0.5}, TypeError, "`scale` must not be given: K is 1 / kernel_size times"),
    ({"transition": "tcwyy"}, ValueError, "`transition` must be one of"),
]


def test_wrong_options_are_named():
    for options, error, message in WRONG_OPTIONS:
        with pytest.raises(error, match=message):
            ConvNERU(**{"in_channels": CHANNELS, "hidden_channels": HIDDEN, **options})


def test_wrong_input_is_named():
    module = unit(3, transition="tagged")
    for shape in ((4, 2, CHANNELS + 1, 5, 5), (CHANNELS, 5, 5), (0, 2, CHANNELS, 5, 5)):
        with pytest.raises(ValueError, match="`input` must have shape"):
            module(torch.zeros(shape, dtype=torch.float64))
    good = torch.zeros(4, 2, CHANNELS, 5, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"`hx` must have shape \(2, 4, 5, 5\), got shape \(2, 4"):
        module(good, torch.zeros(2, HIDDEN, 5, 4, dtype=torch.float64))
