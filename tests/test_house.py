"""The house: who may import whom, and what its names and docstrings look like."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).parent.parent
SOURCES = {"agentrl": ROOT, "agentrl_envs": ROOT / "envs", "agentrl_tools": ROOT / "tools"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

ALIKE = {  # names that two modules may share, and why
    "draw": "each module of tasks draws its own from an integer",
    "sft": "the loss, and the function that trains with it",
    "auto": "the entry that chooses for itself, of engines and of call formats",
    **dict.fromkeys(("local", "ray"), "names of launchers: of runs, of servers and of players"),
    **dict.fromkeys(("parse", "format_call", "format_instructions"), "each written call format is a module"),
}


@cache
def modules() -> dict[str, ast.Module]:
    """Parse every module of the source, by its dotted name."""
    files = {f: root for package, root in SOURCES.items() for f in (root / package).rglob("*.py")}
    names = {f: ".".join(f.relative_to(root).with_suffix("").parts) for f, root in files.items()}
    return {name.removesuffix(".__init__"): ast.parse(f.read_text(encoding="utf-8")) for f, name in names.items()}


def thousands_of_lines() -> float:
    files = [f for package, root in SOURCES.items() for f in (root / package).rglob("*.py")]
    return sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files) / 1000


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    return (n for n in body if isinstance(n, Definition))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each name that is imported, wherever in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def test_each_package_imports_only_from_those_below_it() -> None:
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    said = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert said.returncode == 0, said.stdout
    assert "3 kept, 0 broken" in said.stdout


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, tree in known.items():
        typing_only = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        kept = ast.Module([n for n in tree.body if id(n) not in typing_only], [])
        for module, imported in imports(kept):
            target = f"{module}.{imported}" if f"{module}.{imported}" in known else module
            if target in known and target not in SOURCES:  # what `agentrl` itself gives away, it gives lazily
                arrows[name].add(target)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(arrows[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in known:
        visit(name, ())


def test_types_and_public_functions_of_one_name_are_few_and_have_a_reason() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for module, tree in modules().items():
        for node in definitions(tree.body):
            if isinstance(node, ast.ClassDef) or not node.name.startswith("_"):
                where[node.name].add(module)
    alike = {name: found for name, found in where.items() if len(found) > 1}
    assert set(alike) == set(ALIKE), {name: alike.get(name) for name in set(alike) ^ set(ALIKE)}
    assert len(ALIKE) <= 10


def test_no_docstring_begins_with_a_question() -> None:
    question = re.compile(
        r"(What|Who|Whose|Whom|Whoever|Whatever|Where|Whether|Which|How|Why|When|Inside|Is|Are|Does|Do|Can)\b"
    )
    asking = [
        f"{module}.{getattr(node, 'name', '')}: {text.splitlines()[0]}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | Definition) and question.match(text := ast.get_docstring(node) or "")
    ]
    assert not asking, "\n".join(asking)


def test_public_names_are_few_and_private_ones_stay_at_home() -> None:
    public = [n.name for tree in modules().values() for n in definitions(tree.body) if not n.name.startswith("_")]
    assert len(public) / thousands_of_lines() <= 22
    foreign = [
        f"{module} imports {name} from {source}"
        for module, tree in modules().items()
        for source, name in imports(tree)
        if source.split(".")[0] in SOURCES and name.startswith("_") and not name.startswith("__")
    ]
    assert not foreign


def test_methods_hold_few_functions() -> None:
    nested = [
        f"{module}.{cls.name}.{method.name}: {inner.name}"
        for module, tree in modules().items()
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for method in definitions(cls.body)
        for inner in ast.walk(method)
        if inner is not method and isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(nested) <= 15, nested


PRINTING = {  # modules outside `agentrl.cli` that write to a stream, and why
    "agentrl.library.progress": "lines of a script that calls train, escaped",
    "agentrl.settings.names.adoption": "another library's names, before there is a display",
    "agentrl.runs.metric_catalogue": "prints a page of the documentation, as a program of its own",
    "agentrl.engines.vllm.launchers": "passes on what a server writes",
    "agentrl.learner.roll_call": "names a process that fell silent; nothing else hears any more",
    "agentrl.models.unpacked_gguf": "says, once, what is waited for up to a minute",
}


def test_the_command_line_alone_prints() -> None:
    def writes(node: ast.AST) -> bool:
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        return call == "print" or call.startswith(("sys.stdout.write", "sys.stderr.write", "rich.print"))

    printing = {
        name for name, tree in modules().items() if name.startswith("agentrl.") and any(map(writes, ast.walk(tree)))
    }
    assert {name for name in printing if not name.startswith("agentrl.cli.")} == set(PRINTING)
    consoles = {name for name, tree in modules().items() if ("rich.console", "Console") in imports(tree)}
    assert consoles == set(), "a console is agentrl.cli.output.Console"


def test_any_is_rare() -> None:
    anys = sum(isinstance(n, ast.Name) and n.id == "Any" for tree in modules().values() for n in ast.walk(tree))
    assert anys / thousands_of_lines() <= 20


def test_no_module_has_the_name_of_something_that_agentrl_gives() -> None:
    for name in agentrl.__all__:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"agentrl.{name}")


def test_few_modules_lie_beside_the_packages() -> None:
    assert len(list((ROOT / "agentrl").glob("*.py"))) <= 8


def test_the_page_on_structure_names_every_package_and_no_file_that_is_not_there() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    packages = [p.parent.name for p in (ROOT / "agentrl").glob("*/__init__.py")]
    assert [name for name in packages if f"`agentrl/{name}`" not in page] == []
    paths = re.findall(r"`((?:agentrl|envs/agentrl_envs|tools/agentrl_tools|tests)/[\w/.]+)`", page)
    assert [path for path in paths if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()] == []
    named = [m for m in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", page) if m.split("/")[0] in packages]
    places = [top / name for name in named for top in (ROOT / "agentrl", ROOT)]
    there = {place.name for place in places if place.exists() or place.with_suffix(".py").exists()}
    assert [name for name in named if name.split("/")[-1] not in there] == []
    assert len(named) > 20
