"""Names: an entry point of any package, a module's attribute, a file's attribute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl import UserError
from agentrl.settings.registry import list_registered, load_registered


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(tmp_path: Path, entry_points: str) -> None:
    """What pip leaves behind: a module, and its metadata."""
    write(tmp_path / "site" / "plugin_mod.py", "class Quiz: ...\n")
    write(
        tmp_path / "site" / "plugin-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n"
    )
    write(tmp_path / "site" / "plugin-1.0.dist-info" / "entry_points.txt", entry_points)
    sys.path.append(str(tmp_path / "site"))


def test_a_plugins_entry_point_is_a_name_like_the_built_in_ones(tmp_path: Path) -> None:
    install(tmp_path, "[agentrl.envs]\nquiz = plugin_mod:Quiz\n")
    assert {"quiz", "math-tools", "shop", "prompts"} <= list_registered("env").keys()
    assert "plugin_mod" not in sys.modules  # not before it is asked for
    assert load_registered("env", "quiz").__name__ == "Quiz"
    assert "quiz" not in list_registered("tool")


def test_a_broken_plugin_hurts_nobody_else(tmp_path: Path) -> None:
    install(tmp_path, "[agentrl.envs]\nquiz = plugin_mod:Quizz\ngone = no_such_module:Env\n")
    assert load_registered("env", "math-tools").__name__ == "MathTools"
    with pytest.raises(UserError, match="env 'gone': cannot import 'no_such_module'"):
        load_registered("env", "gone")
    with pytest.raises(UserError, match=r"env 'quiz': 'plugin_mod' has no 'Quizz'; did you mean 'Quiz'\?"):
        load_registered("env", "quiz")


def test_the_built_in_tool() -> None:
    assert load_registered("tool", "calculator").name == "calculator"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("math-tool", r"no env 'math-tool'; did you mean 'math-tools'\? \(or say module:attribute\)"),
        ("zzz", r"no env 'zzz'; known: .*math-tools, .*shop"),
        ("no_such.module:Env", "env 'no_such.module:Env': cannot import 'no_such.module'"),
        (":Env", "env ':Env': cannot import ''"),
        (".mine:Env", "env '.mine:Env': cannot import '.mine'"),
        ("json:JSONDecodr", "'json' has no 'JSONDecodr'; did you mean 'JSONDecoder'"),
        ("json:", "'json' has no ''"),
        ("gone.py:Env", r"env 'gone.py:Env': there is no file gone.py \(from /"),
    ],
)
def test_a_wrong_name_is_told_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_registered("env", name)


def test_a_module_of_the_working_folder(tmp_path: Path) -> None:
    write(tmp_path / "mine_a.py", "class Outer:\n    class Env: ...\n")
    assert load_registered("env", "mine_a:Outer.Env").__qualname__ == "Outer.Env"


def test_a_file_wherever_it_is(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "mine_b.py", "from mine_c import Env\n")
    write(tmp_path / "deep" / "mine_c.py", "class Env: ...\n")
    found = load_registered("env", str(tmp_path / "deep" / "mine_b.py") + ":Env")
    assert found.__name__ == "Env"
    assert load_registered("env", "deep/mine_b.py:Env") is found


def test_two_files_of_one_name_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "mine_d.py", "class Env: ...\n")
    load_registered("env", "one/mine_d.py:Env")
    with pytest.raises(UserError, match=r"another module is called 'mine_d' already; give two/mine_d.py another name"):
        load_registered("env", "two/mine_d.py:Env")
    write(tmp_path / "json.py", "class Env: ...\n")
    with pytest.raises(UserError, match="another module is called 'json' already"):
        load_registered("env", "json.py:Env")


def test_a_missing_dependency_is_named_and_a_bug_by_its_line(tmp_path: Path) -> None:
    write(tmp_path / "needs.py", "import no_such_dependency\n")
    with pytest.raises(UserError, match="cannot import 'needs': No module named 'no_such_dependency'"):
        load_registered("env", "needs:Env")
    write(tmp_path / "buggy.py", "1 / 0\n")
    with pytest.raises(UserError, match=r"cannot import 'buggy': ZeroDivisionError: .* \(buggy\.py, line 1\)"):
        load_registered("env", "buggy:Env")
