"""State tracking: a smoke run, continuation, and what its data promise."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks.papers.siems import state_tracking

pytestmark = pytest.mark.usefixtures("example")


@pytest.mark.usefixtures("drawn")
def test_smoke_prints_what_it_does_and_writes_table_and_picture(tmp_path, capsys) -> None:
    arguments = ["--smoke", "--output", str(tmp_path)]
    state_tracking.main(arguments)
    printed = capsys.readouterr().out
    assert printed.index("; results in ") < printed.index("epoch 1")
    results = json.loads((tmp_path / "results.json").read_text())
    (table,) = results["tables"]
    assert table in printed
    assert (tmp_path / "table.md").read_text() == f"## {table}"
    entries = [entry for run in results["runs"] for entry in run["history"]]
    assert all(math.isfinite(value) for entry in entries for value in entry.values())
    for name in state_tracking.parse_arguments(arguments).tasks:
        assert f"\n| {name} " in table
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "results.json").read_bytes()
    state_tracking.main([*arguments, "--resume"])  # everything is there: nothing is trained again
    assert "epoch 1" not in capsys.readouterr().out
    assert (tmp_path / "results.json").read_bytes() == before
    with pytest.raises(ValueError, match="--resume must keep lr"):
        state_tracking.main([*arguments, "--resume", "--lr", "0.5"])


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path) -> None:
    options = state_tracking.parse_arguments(["--smoke", "--output", str(tmp_path)])
    options.epochs = 2
    whole = state_tracking.build_trainer(options, "S3 n_h=2", 0)
    whole.train("whole")

    begun = state_tracking.build_trainer(options, "S3 n_h=2", 0)
    train_epoch = begun.train_epoch

    def interrupted(bar):
        if begun.history:
            raise KeyboardInterrupt
        return train_epoch(bar)

    begun.train_epoch = interrupted
    with pytest.raises(KeyboardInterrupt):
        begun.train("begun")
    resumed = state_tracking.build_trainer(options, "S3 n_h=2", 0)
    resumed.resume()
    assert len(resumed.history) == 1
    resumed.train("resumed")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_impossible_flags_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        state_tracking.parse_arguments(["--factors", "0"])
    assert "must" in capsys.readouterr().err


@pytest.mark.parametrize("things", [2, 3, 4, 5])
def test_tables_are_those_of_groups(things) -> None:
    table = state_tracking.multiplication_table(things)
    order = math.factorial(things)
    everything = torch.arange(order)
    assert torch.equal(table[0], everything)  # the first permutation is the identity
    assert torch.equal(table.sort(dim=0)[0], everything.unsqueeze(1).expand(order, order))
    assert torch.equal(table.sort(dim=1)[0], everything.expand(order, order))
    a, b, c = torch.randint(order, (3, 500), generator=torch.Generator().manual_seed(0))
    assert torch.equal(table[table[a, b], c], table[a, table[b, c]])


def test_answers_are_the_products_so_far() -> None:
    table = state_tracking.multiplication_table(4)
    elements, products = state_tracking.draw(table, 5, 7, torch.Generator().manual_seed(0))
    expected = torch.zeros(5, dtype=torch.int64)
    for each, product in zip(elements.T, products.T, strict=True):
        expected = table[each, expected]
        assert torch.equal(product, expected)


def test_tested_sequences_do_not_end_a_run() -> None:
    """Two in a row of the second set do; what is reported is the first set."""
    options = state_tracking.parse_arguments(["--smoke"])
    task = state_tracking.build_trainer(options, "S3 n_h=2", 0).task
    assert not torch.equal(task.test[0], task.second[0])
    task.right = torch.tensor(0.0)
    task.model.eval()
    answers = task.model(task.test[0]).argmax(-1), task.model(task.second[0]).argmax(-1)
    for test, second, solved in ((True, False, 0), (False, True, 2)):
        task.model.solved.zero_()
        for _ in range(2):
            task.test, task.second = (
                (elements, answer if right else (answer + 1) % 6)
                for (elements, _), answer, right in zip(
                    (task.test, task.second), answers, (test, second), strict=True
                )
            )
            found = task.evaluate()
        assert found["accuracy_longer"] == float(test)
        assert int(task.model.solved) == solved


def test_a_solved_run_that_goes_on_draws_no_sequence(tmp_path) -> None:
    options = state_tracking.parse_arguments(["--smoke", "--output", str(tmp_path)])
    options.epochs = 1
    begun = state_tracking.build_trainer(options, "S3 n_h=2", 0)
    begun.train("begun")
    begun.model.solved.fill_(2)
    begun.save()
    options.epochs = 2
    resumed = state_tracking.build_trainer(options, "S3 n_h=2", 0)
    resumed.resume()
    resumed.train("resumed")
    first, second = resumed.history
    assert "train_loss" in first
    assert "train_loss" not in second
    assert second["accuracy_longer"] == first["accuracy_longer"]


@pytest.mark.slow
def test_parity_is_learned_and_lasts(tmp_path) -> None:
    arguments = ["--tasks", "parity", "--factors", "1", "--length", "8", "--iterations", "300"]
    state_tracking.main([*arguments, "--output", str(tmp_path)])
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run["history"][-1]["accuracy_longer"] >= 0.95
