"""Reward functions and tools that a script names, as names that agentrl loads; and a file of its own for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.errors import UserError
from agentrl.migration.literals import Scope, UnknownValueError, is_main_guard
from agentrl.migration.plan import UNKNOWN, Plan
from agentrl.settings.names.convert import SHIPPED_REWARDS

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_rewards(tree: ast.Module, scope: Scope, node: ast.expr | None, plan: Plan, path: Path) -> None:
    """Set ``env.rewards`` to the names of a script's reward functions."""
    names = [_name_reward(tree, scope, item, plan, path) for item in _list_functions(tree, scope, node)]
    if not names:
        plan.todo.append("reward_funcs: none was found; env.rewards names them: file.py:function")
    plan.set("env.rewards", names or [f"{UNKNOWN}.py:reward"], "reward_funcs")


def name_shipped(name: str) -> str:
    """Return the reward here that one of TRL's command line is; else ``module:function`` of its dotted path."""
    module, _, function = name.rpartition(".")
    return SHIPPED_REWARDS.get(name) or (f"{module}:{function}" if module else name)


def read_tools(tree: ast.Module, scope: Scope, node: ast.expr | None, plan: Plan, path: Path) -> None:
    """Set ``tools`` to the names of a script's tools."""
    names = [_name_function(tree, scope, item, plan, path, "tools") for item in _list_functions(tree, scope, node)]
    if names:
        plan.set("tools", names, "tools; their types and docstrings are their schemas")


def _list_functions(tree: ast.Module, scope: Scope, node: ast.expr | None) -> Sequence[ast.expr]:
    """List the items of a list, what is appended to it too; a single function is a list of one."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return []
    value = scope.follow(node)
    if not isinstance(value, ast.List | ast.Tuple):
        return [node]
    return [*value.elts, *(_list_appended(tree, node.id) if isinstance(node, ast.Name) else ())]


def _list_appended(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.append" and node.args:
            yield node.args[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.extend" and node.args:
            yield from node.args[0].elts if isinstance(node.args[0], ast.List | ast.Tuple) else node.args


def _name_reward(tree: ast.Module, scope: Scope, node: ast.expr, plan: Plan, path: Path) -> str:
    called = scope.follow(node)
    shipped = called.func if isinstance(called, ast.Call) else node
    if (name := SHIPPED_REWARDS.get(_find_original(tree, ast.unparse(shipped)))) is not None:
        if isinstance(called, ast.Call):
            _read_settings(scope, called, name, plan)
        return name
    if isinstance(called, ast.Constant) and isinstance(called.value, str):
        return f"reward-model:{called.value}"
    return _name_function(tree, scope, node, plan, path, "reward_funcs")


def _read_settings(scope: Scope, call: ast.Call, name: str, plan: Plan) -> None:
    """Set what a shipped reward was made with."""
    order = ("max_completion_len", "soft_punish_cache")
    given = dict(zip(order, call.args, strict=False)) if name == "soft_overlong_punishment" else {}
    for key, value in (given | dict(scope.list_items(call))).items():
        try:
            inside = "" if name == "soft_overlong_punishment" else f"reward_settings.{name}."
            plan.set(f"env.{inside}{key}", scope.evaluate(value), ast.unparse(call.func))
        except UnknownValueError as error:
            plan.todo.append(f"line {error.line}: {key} of {name} = {error} is known only once the script runs")


def _name_function(tree: ast.Module, scope: Scope, node: ast.expr, plan: Plan, path: Path, what: str) -> str:
    """Return ``file.py:function``, or a name that is never found, with a word on what to do."""
    name = ast.unparse(node)
    if isinstance(node, ast.Lambda):
        plan.todo.append(f"line {node.lineno}: {what}: a lambda has no name; make it a function (def) at the top level")
        return f"{UNKNOWN}.py:lambda"
    if (imported := _find_import(tree, name)) is not None:
        module, original = imported
        file = path.parent / f"{module.replace('.', '/')}.py"
        return f"{file if file.is_file() else module}:{original}"
    if isinstance(node, ast.Name) and name in {n for line in tree.body for n in _list_bound(line)}:
        plan.functions.append(name)
        return f"{path}:{name}"
    where = "is made in a function" if name in scope.bindings or _is_nested(tree, name) else "cannot be named"
    plan.todo.append(f"line {node.lineno}: {what}: {name} {where}; put it at the top level of a file: file.py:function")
    return f"{UNKNOWN}.py:{name if name.isidentifier() else 'function'}"


def _is_nested(tree: ast.Module, name: str) -> bool:
    return any(isinstance(n, Definition) and n.name == name for n in ast.walk(tree))


def _find_original(tree: ast.Module, name: str) -> str:
    """Return what a name of ``trl.rewards`` is called there; an empty text for a name of the script's own."""
    if name.startswith(("trl.", "rewards.")):
        return name.rpartition(".")[2]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return alias.name
    return ""


def _find_import(tree: ast.Module, name: str) -> tuple[str, str] | None:
    """Return the module that a name is imported of, and its name there; None for the script's own."""
    head, _, last = name.rpartition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module or "", alias.name
                if (alias.asname or alias.name) == head:
                    return f"{node.module}.{alias.name}", last
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if head and (alias.asname or alias.name) == head:
                    return alias.name, last
    return None


def starts_training(tree: ast.Module, trainer: ast.Call) -> int:
    """Return the line by which importing a script comes to its trainer; 0 where it is behind a guard."""
    makers = {f.name for f in ast.walk(tree) if isinstance(f, Definition) and trainer in list(ast.walk(f))}
    for node in tree.body:
        if isinstance(node, Definition) or is_main_guard(node):
            continue
        for inner in ast.walk(node):
            if inner is trainer or (isinstance(inner, ast.Call) and ast.unparse(inner.func) in makers):
                return getattr(inner, "lineno", 0)
    return 0


def write_functions(script: Path, names: Sequence[str], file: Path) -> None:
    """Write functions of a script, with all that they use of its top level, into a file of their own.

    Raises:
        UserError: the file is there already, or cannot be written.
    """
    text = script.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    statements = [line for line in tree.body if not is_main_guard(line)]
    needed, kept = set(names), set[int]()
    while more := [i for i, line in enumerate(statements) if i not in kept and needed & set(_list_bound(line))]:
        kept.update(more)
        needed |= {n.id for i in more for n in ast.walk(statements[i]) if isinstance(n, ast.Name)}
    parts = [f'"""Functions of {script.name}."""', "from __future__ import annotations"]
    for i in sorted(kept):
        first = min([statements[i].lineno, *(d.lineno for d in getattr(statements[i], "decorator_list", ()))])
        parts.append("\n".join(lines[first - 1 : statements[i].end_lineno]))
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write("\n\n".join(parts) + "\n")
    except FileExistsError:
        raise UserError(f"{file} is there already; give another --functions FILE.py") from None
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def _list_bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a script's top level binds."""
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        if getattr(node, "module", "") != "__future__":
            yield from (a.asname or a.name.split(".")[0] for a in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    elif isinstance(node, ast.Try | ast.If | ast.With):
        for inner in [
            *node.body,
            *getattr(node, "orelse", ()),
            *(h for x in getattr(node, "handlers", ()) for h in x.body),
        ]:
            yield from _list_bound(inner)
