"""Programs on sequences: smoke runs, continuation, and what their data promise."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import in_turn

from benchmarks.papers.likhosherstov import phrases, translation, video, video_units
from benchmarks.papers.siems import state_tracking

PICTURES = {
    state_tracking: ["accuracy.png"],
    translation: ["curves.png"],
    video: ["curves.png"],
}
pytestmark = pytest.mark.usefixtures("example")
PROGRAMS = pytest.mark.parametrize("program", PICTURES, ids=lambda program: program.__name__)


# ----------------------------------------------------------------------------------- whole programs


@PROGRAMS
@pytest.mark.usefixtures("drawn")
def test_smoke_prints_what_it_does_and_writes_table_and_pictures(program, tmp_path, capsys) -> None:
    arguments = ["--smoke", "--output", str(tmp_path)]
    program.main(arguments)
    printed = capsys.readouterr().out
    assert printed.index("; results in ") < printed.index("epoch 1")
    results = json.loads((tmp_path / "results.json").read_text())
    (table,) = results["tables"]
    assert table in printed
    assert (tmp_path / "table.md").read_text() == f"## {table}"
    options = program.parse_arguments(arguments)
    assert all(math.isfinite(value) for run in results["runs"] for value in finite(run))
    for name in options.tasks if program is state_tracking else options.methods:
        assert f"\n| {name} " in table
    for picture in PICTURES[program]:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "results.json").read_bytes()
    program.main([*arguments, "--resume"])  # everything is there: nothing is trained again
    assert "epoch 1" not in capsys.readouterr().out
    assert (tmp_path / "results.json").read_bytes() == before
    with pytest.raises(ValueError, match="--resume must keep lr"):
        program.main([*arguments, "--resume", "--lr", "0.5"])


def finite(run) -> list[float]:
    """Numbers of a history but for the orthonormality error, which a ConvLSTM does not have."""
    entries = (entry.items() for entry in run["history"])
    return [value for items in entries for key, value in items if key != "orthonormality_error"]


@PROGRAMS
def test_an_interrupted_run_goes_on_bit_for_bit(program, tmp_path) -> None:
    arguments = ["--smoke", "--output", str(tmp_path)]
    options = program.parse_arguments(arguments)
    options.epochs = 2
    data = {
        video: lambda: (video_units.load_clips(options),),
        translation: lambda: (translation.load_corpus(options),),
        state_tracking: lambda: (),
    }[program]()
    title = "S3 n_h=2" if program is state_tracking else options.methods[0]
    whole = program.build_trainer(options, *data, title, 0)
    whole.train("whole")

    begun = program.build_trainer(options, *data, title, 0)
    train_epoch = begun.train_epoch

    def interrupted(bar):
        if begun.history:
            raise KeyboardInterrupt
        return train_epoch(bar)

    begun.train_epoch = interrupted
    with pytest.raises(KeyboardInterrupt):
        begun.train("begun")
    resumed = program.build_trainer(options, *data, title, 0)
    resumed.resume()
    assert len(resumed.history) == 1
    resumed.train("resumed")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (state_tracking, ["--factors", "0"]),
        (video, ["--side", "12"]),
        (translation, ["--reflections", "65", "--hidden", "64"]),
    ],
    ids=["factors", "side", "reflections"],
)
def test_impossible_flags_are_refused(program, arguments, capsys) -> None:
    with pytest.raises(SystemExit):
        program.parse_arguments(arguments)
    assert "must" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- state tracking


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


# -------------------------------------------------------------------------------------------- video


def test_digits_move_steadily_and_bounce() -> None:
    pool = torch.ones(1, 4, 4)
    clips = video_units.moving_digits(pool, 6, 40, 16, torch.Generator().manual_seed(0))
    assert clips.shape == (40, 6, 16, 16)
    assert set(clips.unique().tolist()) == {0.0, 1.0}
    covered = clips.sum((-2, -1))
    assert covered.min() >= 16
    assert covered.max() <= 32
    for before, after in pairwise(clips):
        assert ((after - before).abs().sum((-2, -1)) > 0).all()  # nothing stands still
    for dim in (-2, -1):
        assert clips.amax((0, 1, dim)).min() == 1  # every wall is reached


@pytest.mark.parametrize("title", ["T-CWY", "ConvLSTM"])
def test_predictions_know_only_the_past(title) -> None:
    torch.manual_seed(0)
    model = video_units.Predictor(video.METHODS[title], 2)
    frames = torch.rand(5, 2, 16, 16, requires_grad=True)
    predicted = model(frames)
    assert predicted.shape == frames.shape
    predicted[2].sum().backward()
    reached = frames.grad.abs().sum((-3, -2, -1))
    assert (reached[:3] > 0).all()  # also the first frame, which only the state remembers
    if title == "T-CWY":  # instance normalization in a batch of frames is by frame, too
        assert (reached[3:] == 0).all()


def test_the_zero_kernel_sees_one_frame_and_every_other_stays_on_the_manifold() -> None:
    torch.manual_seed(0)
    model = video_units.Predictor(video.METHODS["Zero kernel"], 2)
    frames = torch.rand(3, 1, 16, 16, requires_grad=True)
    model(frames)[2].sum().backward()
    assert (frames.grad[:2] == 0).all()
    for title, method in video.METHODS.items():
        if method.transition is not None:
            error = video_units.Predictor(method, 2).orthonormality_error()
            assert error < 1e-5, title


def test_kth_is_whole_sequences_of_one_action_split_by_person(tmp_path) -> None:
    lengths = {person: 3 + person % 4 for person in range(1, 26)}
    for person, length in lengths.items():
        for action in ("walking", "boxing"):
            level = person if action == "walking" else 99
            frames = np.full((length, 16, 16), level, dtype=np.uint8)
            np.savez(tmp_path / f"person{person:02}_{action}_d1_1.npz", frames=frames)
    flags = ["--preset", "paper", "--data-dir", str(tmp_path), "--side", "16", "--channels", "2"]
    options = video.parse_arguments(flags)
    clips = video_units.load_clips(options)
    assert options.steps == 4  # twelve persons, three at a time
    drawn = {**clips, "train": list(clips["train"](options, torch.Generator().manual_seed(0)))}
    for part, batches in drawn.items():
        assert [batch.size(1) for batch in batches][:-1] == [3] * (len(batches) - 1)
        seen = {}
        for sequence in (one for batch in batches for one in batch.unbind(1)):
            real = sequence[:, 0, 0] >= 0
            (level,) = (255 * sequence[real]).round().unique().tolist()
            seen[int(level)] = int(real.sum())
        assert seen == {person: lengths[person] for person in video_units.PERSONS[part]}
    with pytest.raises(SystemExit, match=r"must be uint8 of shape \(T, 32, 32\)"):
        video_units.load_clips(video.parse_arguments([*flags, "--side", "32"]))


def test_what_follows_a_shorter_sequence_counts_for_nothing() -> None:
    options = video.parse_arguments(["--preset", "paper", "--side", "16", "--channels", "2"])
    model = video_units.Predictor(video.METHODS["T-CWY"], 2, first_stride=2)
    task = video.Prediction(model, {}, options)
    long, short = torch.rand(9, 1, 16, 16), torch.rand(5, 1, 16, 16)
    both = torch.cat([long, torch.cat([short, torch.full((4, 1, 16, 16), -1.0)])], dim=1)
    apart = torch.cat([task.errors(long)[0], task.errors(short)[0]])
    torch.testing.assert_close(task.errors(both)[0].sort()[0], apart.sort()[0])
    torch.testing.assert_close(task.loss(both)[0], apart.mean())


def test_the_paper_preset_has_units_of_the_papers_sizes() -> None:
    options = video.parse_arguments(["--preset", "paper"])
    model = video_units.Predictor(video.METHODS["T-CWY"], options.channels, options.first_stride)
    sizes = []
    for unit in model.recurrent:
        unit.register_forward_hook(lambda _, given, __: sizes.append(tuple(given[0].shape[2:])))
    assert model(torch.rand(2, 1, 128, 128)).shape == (2, 1, 128, 128)
    assert sizes == [(32, 32, 32), (64, 16, 16), (128, 8, 8), (64, 16, 16), (32, 32, 32)]


# -------------------------------------------------------------------------------------- translation


def test_phrases_agree_and_no_test_source_was_seen() -> None:
    pairs = phrases.generated_pairs(10**6)
    translations = {" ".join(source): " ".join(target) for source, target in pairs}
    assert len(translations) == len(pairs)
    assert translations["she does not buy a red house now"] == "ella no compra una casa roja ahora"
    assert translations["we paint the new boat"] == "nosotros pintamos el barco nuevo"
    train, test = phrases.split(pairs[:500] + pairs[:200])
    assert len(train) + len(test) == 700
    assert not {tuple(s) for s, _ in train} & {tuple(s) for s, _ in test}


def test_pairs_are_read_from_tab_separated_text(tmp_path) -> None:
    text = "Go, now!\t¡Vete ahora!\tignored\nno second side\nA b c d e f\tg\n"
    with gzip.open(tmp_path / "pairs.tsv.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    (tmp_path / "pairs.tsv").write_text(text, encoding="utf-8")
    expected = [(["go", ",", "now", "!"], ["¡", "vete", "ahora", "!"])]
    for name in ("pairs.tsv", "pairs.tsv.gz"):
        assert phrases.read_pairs(tmp_path / name, longest=5) == expected
    with pytest.raises(SystemExit, match="--pairs must be a file"):
        phrases.read_pairs(tmp_path / "absent", longest=5)
    assert phrases.words("Él está aquí.") == ["el", "esta", "aqui", "."]


@pytest.mark.parametrize(
    ("title", "attention"),
    in_turn(["RNN", "LSTM", "CWY L=4", "SCORNN", "StiefelAdam"], ["luong", "additive"]),
)
def test_padding_and_company_change_no_translation(title, attention) -> None:
    options = translation.parse_arguments(["--smoke"])
    corpus = translation.load_corpus(options)
    torch.manual_seed(0)
    words = len(corpus.sources), len(corpus.targets)
    model = translation.Translator(title, *words, options.embedding, options.hidden, attention)
    task = translation.Translation(model, corpus, options)
    pairs = sorted(task.numbers["train"], key=lambda pair: len(pair[0]))
    short, long = pairs[0], pairs[-1]
    assert len(short[0]) < len(long[0])
    together, count = task.sums(task.padded([short, long]))
    apart = [task.sums(task.padded([pair])) for pair in (short, long)]
    torch.testing.assert_close(together, apart[0][0] + apart[1][0])
    assert count == apart[0][1] + apart[1][1] == len(short[1]) + len(long[1])
