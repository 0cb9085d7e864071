"""A step off a CPU launches few kernels and reads nothing."""

import pytest

from benchmarks.speed.launches import launches

# Of each row today; one matrix of POGO takes 33 and, with Adam, 40.
BARS = [
    ("128x2", "StiefelSGD", 35.2),
    ("128x2", "StiefelAdam", 48),
    ("2000x16x16", "StiefelSGD", 24),
    ("2000x16x16", "StiefelAdam", 36),
    ("168 of 384x32", "StiefelSGD", 45.2),
    *(
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("4096x512", "StiefelSGD", 35.2),
            ("4096x512", "StiefelAdam", 48),
            ("168 of 384x32", "StiefelAdam", 64),
        )
    ),
]


@pytest.mark.parametrize(("row", "optimizer", "bar"), BARS)
def test_a_step_launches_few_kernels_and_reads_nothing(
    row: str, optimizer: str, bar: float
) -> None:
    found, reads = launches(row, optimizer)
    assert found <= bar + 0.05
    assert reads == 0
