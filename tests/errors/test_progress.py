"""The bar of long runs."""

import sys

import pytest

from stiefel_opt.errors import ProgressBar


def test_a_bar_counts_steps_and_is_closed_where_its_block_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []
    bars = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(bars, "close", lambda bar: closed.append(bar.n))

    def stopped() -> None:
        with ProgressBar(5, shown=True) as bar:
            bar.update(2)
            bar.update(note="loss 1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert closed[0] == 3


def test_a_bar_that_is_not_shown_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with ProgressBar(5, shown=False) as bar:
        bar.update()
    with pytest.raises(ImportError, match="tqdm must be installed"):
        ProgressBar(5, shown=True)
