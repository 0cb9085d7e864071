"""Every example is one short file that can be copied alone, and prints what it promises."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import output_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LONGER = {"llm_rotations", "demo", "certified"}  # whole programs
SHORT = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in LONGER)


def run(name: str, folder: Path, *changes: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    """A copy of the example, run in an empty folder; ``changes`` are of single lines, for time."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    for line, other in changes:
        lines[lines.index(line)] = other
    (folder / f"{name}.py").write_text("\n".join(lines), encoding="utf-8")
    return output_of(folder / f"{name}.py")


def shown(name: str, folder: Path, *changes: tuple[str, str]) -> str:
    done = run(name, folder, *changes)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The groups of every match, one after the other."""
    matches = re.finditer(pattern, text, re.MULTILINE)
    found = [float(value) for match in matches for value in match.groups()]
    assert found, f"{pattern} not in:\n{text}"
    return found


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_one_short_file(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    tree = ast.parse(text)
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "argparse" not in modules
    assert not {module for module in modules if (EXAMPLES / f"{module}.py").exists()}
    assert f"python examples/{name}.py" in (ast.get_docstring(tree) or "")


def test_attention(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = shown("vit_attention", tmp_path, ("EPOCHS = 12", "EPOCHS = 3"))
    tagged, plain = numbers(r"([\d.]+)% of the test images", text)
    assert tagged > plain - 5
    assert tagged > 60
    assert "queries: 1.0000 to 1.0000" in text


def test_the_demo(tmp_path: Path) -> None:
    for package in ("matplotlib", "sklearn", "tqdm"):
        pytest.importorskip(package)
    text = shown("demo", tmp_path, ("    main()", "    main(1, range(2))"))
    assert len(re.findall(r"^\w*Adam.* +(?: +\S+ ± \S+){4}$", text, re.MULTILINE)) == 4
    assert "make test" in text.splitlines()[-1]
    content = json.loads((tmp_path / "runs" / "demo.json").read_text(encoding="utf-8"))
    assert [len(rows) for rows in content["errors"].values()] == [4, 4, 4, 4]
    assert str(tmp_path / "runs" / "demo.png") in text
    assert (tmp_path / "runs" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    text = shown("rnn_memory", tmp_path)
    tagged = numbers(r"orthogonal transition +learning rate [\d.]+ +(\d+)%", text)
    free = numbers(r"unconstrained transition +learning rate [\d.]+ +(\d+)%", text)
    assert min(tagged[0], free[0]) > 90
    assert tagged[1] > 60
    assert free[1] < 40
    assert numbers(r"LSTM +learning rate [\d.]+ +(\d+)%", text)[0] < 30


def test_memory_for_a_few_steps(tmp_path: Path) -> None:
    text = shown("rnn_memory", tmp_path, ("PAUSE = 100", "PAUSE = 5"), ("STEPS = 100", "STEPS = 2"))
    assert len(numbers(r"rate 0.0\d+ +(\d+)% of the digits", text)) == 5


def test_convolutions(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = shown("convolutions", tmp_path, ("EPOCHS = 15", "EPOCHS = 5"))
    (_, one, safe), (_, more, none) = (
        tuple(map(float, found))
        for found in re.findall(r"Adam +([\d.]+)% +([\d.]+) +([\d.]+)%", text)
    )
    assert one == 1
    assert safe > 30
    assert more > 5
    assert none == 0


def test_certified(tmp_path: Path) -> None:
    for package in ("matplotlib", "sklearn"):
        pytest.importorskip(package)
    text = shown("certified", tmp_path, ("STEPS = 600", "STEPS = 60"))
    bound, ordinary = numbers(r"last layer ([\d.]+); of the ordinary network ([\d.]+)", text)
    assert 1 <= bound <= 1 + 1e-5
    assert ordinary > 10
    right, _ = numbers(r"^right: ([\d.]+)%, ordinary network ([\d.]+)%", text)
    (proven,) = numbers(r"by proof within \S+: ([\d.]+)%", text)
    kept, _ = numbers(r"under attack within \S+: ([\d.]+)%, ordinary ([\d.]+)%", text)
    assert 2 < proven <= kept <= right
    assert right > 80
    assert (tmp_path / "certified.png").read_bytes().startswith(b"\x89PNG")


def test_fine_tuning(tmp_path: Path) -> None:
    for package in ("sklearn", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not here")
    # The wheel of PyPI is built for CUDA and does not load beside the CPU build of torch;
    # transformers then has no vision models.
    source = "import importlib.util as u; u.find_spec('torchvision') and __import__('torchvision')"
    loading = [sys.executable, "-c", source]
    if subprocess.run(loading, capture_output=True, check=False).returncode:
        pytest.skip("this torchvision does not load beside this torch")
    text = shown("finetune_transformer", tmp_path)
    assert min(numbers(r"(?:pretrained|fine-tuned).*: ([\d.]+)% right", text)) > 80
    assert max(numbers(r"orthonormality error (\S+)", text)) < 1e-5
    assert "same bits: True" in text


def test_fine_tuning_says_what_is_missing(tmp_path: Path) -> None:
    hidden = "import sys\nsys.modules['transformers'] = None"
    done = run("finetune_transformer", tmp_path, ("import sys", hidden))
    assert done.returncode == 1
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"This example needs more \(.*\); run: pip install .*transformers.*", sentence
    )


def test_components_and_procrustes(tmp_path: Path) -> None:
    text = shown("pca_procrustes", tmp_path)
    assert abs(numbers(r"short of the best by (\S+)", text)[-1]) < 1e-9
    losses = numbers(r"loss ([\d.]+)", text)
    best = numbers(r"by svd: ([\d.]+)", text)[0]
    assert min(losses) == best
    assert max(losses) > 100 * best


def test_transport(tmp_path: Path) -> None:
    pytest.importorskip("ot")
    text = shown("transport_distance", tmp_path)
    lines = re.findall(r"radius \d +([\d.]+) +([\d.]+) +(\d+) degrees", text)
    whole, best, angles = (list(map(float, column)) for column in zip(*lines, strict=True))
    assert best == sorted(best)
    assert best[-1] / best[0] > 5 * whole[-1] / whole[0]
    assert angles[-1] < 15


def test_resuming(tmp_path: Path) -> None:
    text = shown("resume", tmp_path)
    assert "killed (exit code -9)" in text
    assert 0 < numbers(r"goes on at step (\d+)", text)[0] < 400
    assert "the same bits in both weights: True" in text
    assert [path.name for path in tmp_path.iterdir()] == ["resume.py"]
