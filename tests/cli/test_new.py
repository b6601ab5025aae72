"""`agentrl new`: the package it writes installs, registers, passes its tests and the check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from agentrl import Tool, UserError, templates
from agentrl.cli import main
from agentrl.settings import registry
from agentrl.templates import TemplateKind

ROOT = Path(__file__).parents[2]
MADE: list[tuple[TemplateKind, str]] = [("env", "crates"), ("tool", "weather-report")]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("kind", "name"), MADE)
def test_what_is_written(
    kind: TemplateKind, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["new", kind, name]) == 0
    said = capsys.readouterr().out
    assert f"pip install -e 'agentrl-{name}[test]'" in said
    assert f"agentrl check {kind} {name}" in said
    package, folder = f"agentrl_{name.replace('-', '_')}", Path(f"agentrl-{name}")
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        *("pyproject.toml", "README.md", ".gitignore", f"tests/test_{package}.py"),
        *(f"src/{package}/__init__.py", f"src/{package}/py.typed"),
    }
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"agentrl-{name}"
    (target,) = project["entry-points"][f"agentrl.{kind}s"].values()
    monkeypatch.syspath_prepend(str(folder / "src"))
    made = registry.import_object(name, target)
    assert isinstance(made, Tool if kind == "tool" else type)
    if isinstance(made, Tool):
        assert made.name == name.replace("-", "_")
        assert "async def" in (folder / "src" / package / "__init__.py").read_text()
    needs = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert [re.split("[<>=]", need)[0] for need in needs] == ["pytest"]  # all that its tests import beside agentrl
    assert "$" not in "".join(p.read_text() for p in folder.rglob("*.py"))


@pytest.mark.parametrize(("kind", "name"), MADE)
def test_what_is_written_is_tidy(kind: TemplateKind, name: str) -> None:
    folder = templates.write_package(kind, name)
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        subprocess.run([sys.executable, "-m", *command, "."], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["env", "shop"], "there is an env 'shop' already"),
        (["tool", "calculator"], "there is a tool 'calculator' already"),
        (["env", "My_Env"], "'My_Env' is no name: lower-case letters, digits and hyphens, such as my-env"),
        (["env", "1st"], "'1st' is no name"),
        (["env", "a--b"], "'a--b' is no name"),
        (["tool", "lambda"], "'lambda' is a word of Python's or pytest's own; take another, such as my-lambda"),
        (["env", "test-it"], "'test-it' is a word of Python's or pytest's own"),
        (["tool", "note"], "'note' is a name that the package's own code needs; take another, such as my-note"),
        (["env", "trajectory"], "'trajectory' is a name that the package's own code needs"),
        (["env", "here", "--out", "taken"], "'taken' exists; say --out DIR for another folder"),
        (["env", "here", "--out", "file/inside"], "cannot write 'file/inside': Not a directory"),
        (["env", "here", "--ot", "x"], "ot: unknown setting; did you mean 'out'"),
        (["envs", "here"], "did you mean 'env'"),
        (["env"], "agentrl new takes: {env,tool} NAME"),
    ],
)
def test_what_cannot_be_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    Path("file").write_text("in the way")
    assert main(["new", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("agentrl-here").exists()


def test_an_environment_and_a_tool_may_share_a_name() -> None:
    templates.check_package_name("tool", "shop")
    with pytest.raises(UserError):
        templates.check_package_name("env", "shop")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a clean venv with this checkout's wheel in it, which sees the packages of the one that runs the tests."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True, symlinks=True)
    outer = next(p for p in sys.path if p.endswith("site-packages"))
    python = folder / "bin/python"
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    Path(site, "outer.pth").write_text(f"import sys; sys.path.append({outer!r})\n")
    _install(python, _wheel(ROOT, folder / "dist"))
    return python


def _wheel(project: Path, out: Path) -> Path:
    command: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def _install(python: Path, wheel: Path) -> None:
    command: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, env=_clean())


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


def _said(python: Path, *words: str, cwd: Path | None = None) -> str:
    done = subprocess.run([python, *words], capture_output=True, text=True, check=False, env=_clean(), cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [MADE[0], pytest.param(*MADE[1], marks=pytest.mark.long)])
def test_its_wheel_works_in_a_clean_venv(kind: TemplateKind, name: str, python: Path, tmp_path: Path) -> None:
    _said(python, "-m", "agentrl", "new", kind, name)
    folder = tmp_path / f"agentrl-{name}"
    _install(python, _wheel(folder, tmp_path / "dist"))
    where = _said(python, "-c", "import agentrl; print(agentrl.__file__)")
    assert Path(where.strip()).is_relative_to(python.parent.parent)
    assert name in _said(python, "-m", "agentrl", "list")
    assert "0 to look at, 0 failed" in _said(python, "-m", "agentrl", "check", kind, name)
    assert "passed" in _said(python, "-m", "pytest", "-q", cwd=folder)
    assert "Success" in _said(python, "-m", "mypy", cwd=folder)
    env = ["--env", name] if kind == "env" else ["--env", "math-tools", "--tools", name]
    (tmp_path / "played.txt").write_text("\\boxed{1}\n")
    assert "reward" in _said(python, "-m", "agentrl", "play", *env, "--script", "played.txt")
