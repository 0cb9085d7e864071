"""so.show_versions prints what an issue needs, and nothing of the machine's own."""

import platform
from pathlib import Path

import pytest
import torch

import stiefel_opt as so


def test_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert so.show_versions() is None
    text = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["stiefel_opt"] == so.__version__
    assert lines["torch"] == torch.__version__.split("+")[0] or torch.__version__ in text
    assert lines["python"] == platform.python_version()
    assert {"numpy", "pot", "transformers", "system", "cuda", "device", "threads"} <= lines.keys()
    assert str(Path.home()) not in text
    assert platform.node() not in text


def test_a_package_that_is_missing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stiefel_opt.tools.versions.PACKAGES", ("no-such-package",))
    so.show_versions()
    assert "no-such-package  not installed" in capsys.readouterr().out


def test_the_form_for_bugs_asks_for_them() -> None:
    form = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE" / "bug.yml"
    assert "so.show_versions()" in form.read_text(encoding="utf-8")
