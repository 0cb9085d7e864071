"""Every operation of known cost is seen by the counter of flops, at that cost."""

import warnings

import pytest
import torch

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
