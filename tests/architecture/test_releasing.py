"""What a release has beside its code: workflows, templates, recipe, changelog agree with it."""

import ast
import importlib
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

import stiefel_opt as so

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
ACTIONS = sorted((GITHUB / "actions").rglob("action.yml"))
TEMPLATES = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
CONFIGS = [*sorted(GITHUB.rglob("*.yml")), ROOT / ".readthedocs.yaml", *ROOT.glob("conda/*/*.yaml")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
CONDA_NAMES = {"torch": "pytorch"}  # where they differ from those of pip


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    values: dict[str, Any] = PROJECT["project"]
    return values


def pythons() -> list[str]:
    """The minor versions that the classifiers name."""
    return re.findall(r":: (3\.\d+)", "\n".join(project()["classifiers"]))


def steps(path: Path) -> list[dict[str, Any]]:
    content = read(path)
    parts = content["jobs"].values() if "jobs" in content else [content["runs"]]
    return [step for part in parts for step in part["steps"]]


# ---- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_it_is_yaml_without_secrets_and_addresses(path: Path) -> None:
    assert isinstance(read(path), dict)
    text = path.read_text(encoding="utf-8")
    assert "secrets" not in text
    assert "://" not in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    content = read(path)
    assert content["permissions"] == {"contents": "read"}
    assert content["concurrency"]["cancel-in-progress"] is True
    assert all(job["timeout-minutes"] <= 120 for job in content["jobs"].values())


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=name_of)
def test_an_action_is_ours_or_of_one_version(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    for action in used:
        ours = action.startswith("./") and (ROOT / action / "action.yml").is_file()
        assert ours or re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_calls_targets_and_variables_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE))
    runs = [step["run"] for step in steps(path) if "run" in step]
    assert runs
    for command in runs:
        assert re.match(r"make ([\w-]+)", command).group(1) in targets, command
        assert set(re.findall(r" ([A-Z_]+)=", command)) <= variables, command


def test_the_tests_run_on_every_python_that_the_package_names() -> None:
    matrix = read(GITHUB / "workflows" / "ci.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == pythons()
    files = [*matrix["constraints"], *(row["constraints"] for row in matrix["include"])]
    assert all((ROOT / file).is_file() for file in files)
    assert matrix["include"][0]["python"] == pythons()[0]


def test_the_documentation_is_built_as_by_make_docs() -> None:
    content = read(ROOT / ".readthedocs.yaml")
    assert (ROOT / content["sphinx"]["configuration"]).is_file()
    assert content["sphinx"]["fail_on_warning"] is True
    assert content["build"]["tools"]["python"] in pythons()
    commands = "\n".join(line for job in content["build"]["jobs"].values() for line in job)
    assert "--torch-backend cpu" in commands
    for file in re.findall(r"--constraints? (\S+)", commands):
        assert (ROOT / file).is_file()
    for extra in re.findall(r"\.\[(\w+)\]", commands):
        assert extra in project()["optional-dependencies"]


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_template_is_a_form(path: Path) -> None:
    form = read(path)
    assert all(form[key] for key in ("name", "description", "labels"))
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert fields[0]["validations"]["required"]


def test_a_bug_comes_with_the_report_and_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    text = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    assert "so.report(model, optimizer)" in text
    (code,) = re.findall(r'python -c "(.*)"', text)
    exec(code, {})
    printed = capsys.readouterr().out.split()
    assert printed[:2] == ["stiefel_opt", so.__version__]
    assert printed[printed.index("torch") + 1] in torch.__version__


# ---- versions ------------------------------------------------------------------------------------


def test_the_recipe_agrees_with_the_package() -> None:
    recipe = read(ROOT / "conda" / "recipe" / "recipe.yaml")
    assert recipe["context"]["version"] == so.__version__
    assert f">={recipe['context']['python_min']}" == project()["requires-python"]
    assert recipe["package"]["name"] == project()["name"]
    assert recipe["about"]["summary"] == project()["description"]
    assert recipe["about"]["license"] == project()["license"]
    for found, wanted in (
        (recipe["requirements"]["run"], project()["dependencies"]),
        (recipe["requirements"]["host"], PROJECT["build-system"]["requires"]),
    ):
        bounds = [requirement.split(">=") for requirement in wanted]
        expected = {f"{CONDA_NAMES.get(name, name)} >={bound}" for name, bound in bounds}
        assert {each for each in found if not re.match(r"python |pip$", each)} == expected
    for module in recipe["tests"][0]["python"]["imports"]:
        importlib.import_module(module)


def test_the_recipe_renders() -> None:
    recipes = pytest.importorskip("rattler_build")
    path = ROOT / "conda" / "recipe" / "recipe.yaml"
    (variant,) = recipes.Stage0Recipe.from_file(path).render()
    rendered = variant.recipe.to_dict()
    assert rendered["package"] == {"name": project()["name"], "version": so.__version__}
    assert f"python {project()['requires-python']}" in rendered["requirements"]["run"]


def test_the_lowest_versions_are_those_of_the_package() -> None:
    text = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    lowest = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", text, re.MULTILINE))
    bounds = dict(requirement.split(">=") for requirement in project()["dependencies"])
    assert lowest == bounds


def test_the_changelog_ends_unreleased_work_with_this_version() -> None:
    titles = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    released = [title.split(" - ") for title in titles if title != "Unreleased"]
    assert titles[0] == "Unreleased" or len(released) == len(titles)
    assert released[0][0] == so.__version__
    numbers = [tuple(map(int, number.split("."))) for number, _ in released]
    assert numbers == sorted(numbers, reverse=True)
    days = [date.fromisoformat(day) for _, day in released]
    assert days == sorted(days, reverse=True)
    kinds = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_style_is_checked_for_the_lowest_python() -> None:
    lowest = project()["requires-python"].removeprefix(">=")
    assert lowest == pythons()[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")


@pytest.mark.parametrize("folder", ["stiefel_opt", "examples", "benchmarks", "docs"])
def test_the_lowest_python_reads_the_code(folder: str) -> None:
    version = tuple(map(int, pythons()[0].split(".")))
    for path in (ROOT / folder).rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(version[0], version[1]))
