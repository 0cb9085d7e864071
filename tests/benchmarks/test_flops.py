"""Every operation of known cost is seen by the counter of flops, at that cost."""

import warnings

import pytest
import torch

import stiefel_opt as so

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the rivals, about torch
    pytest.importorskip("geoopt")
    pytest.importorskip("pogo")
    from benchmarks.speed import flops

TALL, SMALL = torch.randn(2, 30, 6), torch.eye(6).expand(2, 6, 6).contiguous()
KNOWN = {
    "qr": (lambda: torch.linalg.qr(TALL), 2 * (4 * 30 * 36 - 4 * 216 / 3)),
    "solve": (lambda: torch.linalg.solve(SMALL, TALL.mT), 2 * (144 + 2 * 36 * 30)),
    "solve_ex": (lambda: torch.linalg.solve_ex(SMALL, SMALL), 2 * (144 + 2 * 216)),
    "inv": (lambda: torch.linalg.inv(SMALL), 2 * 2 * 216),
    "cholesky": (lambda: torch.linalg.cholesky_ex(SMALL), 2 * 72),
    "triangular solve": (
        lambda: torch.linalg.solve_triangular(SMALL, TALL, upper=True, left=False),
        2 * 36 * 30,
    ),
    "eigh": (lambda: torch.linalg.eigh(SMALL), 2 * 9 * 216),
    "svd": (lambda: torch.linalg.svd(TALL), 2 * (6 * 30 * 36 + 20 * 216)),
    "matrix_exp": (lambda: torch.linalg.matrix_exp(SMALL), 2 * 10 * 216),
    "baddbmm_": (lambda: TALL.clone().baddbmm_(TALL, SMALL), 2 * 2 * 30 * 36),
    "bmm": (lambda: torch.bmm(TALL, SMALL), 2 * 2 * 30 * 36),
    "addmm_": (lambda: TALL[0].clone().addmm_(TALL[0], SMALL[0]), 2 * 30 * 36),
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_operation_of_known_cost_is_counted(name: str) -> None:
    call, expected = KNOWN[name]
    assert flops.count(call) == expected


@pytest.mark.parametrize("name", flops.STEPS_AS_PUBLISHED)
def test_a_published_step_is_that_of_the_package(name: str) -> None:
    metric, retraction = name.split("-")
    X = torch.linalg.qr(torch.randn(30, 6, dtype=torch.float64)).Q
    G = torch.randn(30, 6, dtype=torch.float64)
    weight = so.ManifoldParameter(X.clone())
    weight.grad = G.clone()
    options = {"C": "cayley", "QR": "qr"}[retraction], {"C": "canonical", "E": "euclidean"}[metric]
    so.ProjectedRGD([weight], lr=flops.STEP_SIZE, retraction=options[0], metric=options[1]).step()
    published = flops.STEPS_AS_PUBLISHED[name](X, G)
    if retraction == "QR":  # its columns are unique up to their signs
        published = published * (published * weight).sum(0).sign()
    assert (published - weight).abs().max() < 1e-12
