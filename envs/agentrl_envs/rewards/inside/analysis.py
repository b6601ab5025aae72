"""Statements as tests, read before they run: which names they take from the submission, and which calls come first."""

from __future__ import annotations

import ast
import builtins
import json
import symtable
import sys
from collections.abc import Iterator

from agentrl_envs.rewards.inside import plain_data
from agentrl_envs.rewards.inside.examiner import NAME
from agentrl_envs.rewards.inside.plain_data import Value

MAX_CALLS = 1_000
_ALIASES = {"np": "numpy"}
_SKIPPED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
_LATER = (
    *(ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp),
    *(ast.For, ast.AsyncFor, ast.While, ast.If, ast.Try, ast.With, ast.AsyncWith, ast.Match),
)


def analyze(tests: str) -> str:
    """Describe statements in JSON.

    ``names`` are what the submission has to define, ``modules`` those of Python's library that are not imported,
    ``ready`` the requests that the statements seem to begin with, ``complete`` whether they seem to be all, and
    ``calls`` whether they call anything. Or ``error``: why they cannot be tests.
    """
    try:
        tree = ast.parse(tests)
        free = _list_free_names(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return json.dumps({"error": f"the tests are no Python: {error}"})
    modules = {n: _ALIASES.get(n, n) for n in free if _is_module(n, tree)}
    names = [n for n in free if n not in modules and not hasattr(builtins, n)]
    names += [n for n in _list_imported(tree) if n not in names]
    if not names:  # a function that is called as one of Python's own, such as sum, is the first one called
        names = [n for n in _list_called(tree) if n in free][:1]
    if not names:
        return json.dumps({"error": "the tests name nothing that an answer could define"})
    ready: list[str] = []
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    complete = _collect(tree.body, {n: n for n in names}, functions, ready) and bool(ready)
    calls = any(n in names for n in _list_called(tree)) or _passes_on(tree, names)
    plan = {"names": names, "modules": modules, "ready": ready[:MAX_CALLS], "calls": calls}
    return json.dumps({**plan, "complete": complete and len(ready) <= MAX_CALLS})


def _list_free_names(tests: str) -> list[str]:
    """List the globals that the statements read and do not define."""
    top = symtable.symtable(tests, "<tests>", "exec")
    own = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    read: dict[str, None] = {}
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table is top or symbol.is_global()
            if is_global and symbol.is_referenced() and symbol.get_name() not in own:
                read[symbol.get_name()] = None
    return sorted(read)


def _is_module(name: str, tree: ast.Module) -> bool:
    """Return whether a name is used as a module of Python's library is, and never called."""
    if name not in sys.stdlib_module_names and name not in _ALIASES:
        return False
    return name not in _list_called(tree)


def _list_imported(tree: ast.Module) -> list[str]:
    """List what the statements import from the module ``solution``, or take as its attribute."""
    nodes = list(ast.walk(tree))
    imports = [a.name for n in nodes if isinstance(n, ast.ImportFrom) and n.module == NAME for a in n.names]
    attributes = [
        n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == NAME
    ]
    return [name for name in dict.fromkeys([*imports, *attributes]) if name != "*"]


def _list_called(tree: ast.AST) -> list[str]:
    """List the names that are called, inner calls before outer ones."""
    calls = (n for n in _walk_inner_first(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    return list(dict.fromkeys(n.func.id for n in calls if isinstance(n.func, ast.Name)))


def _walk_inner_first(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield from _walk_inner_first(child)
    yield node


def _passes_on(tree: ast.Module, names: list[str]) -> bool:
    """Return whether a name of the submission's is an argument, as in ``check(candidate)``, or a base."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call | ast.Attribute))
    return any(isinstance(n, ast.Name) and n.id in names for call in calls for n in ast.walk(call))


def _collect(
    body: list[ast.stmt], names: dict[str, str], functions: dict[str, ast.FunctionDef], ready: list[str]
) -> bool:
    """Collect the calls with constants that come first. Return False where one comes whose arguments take running.

    Args:
        names: what is called, by the name that it has here.
    """
    for statement in body:
        if isinstance(statement, _SKIPPED):
            continue
        if (inner := _find_check(statement, names, functions)) is not None:
            function, parameter, name = inner
            if not _collect(function.body, {**names, parameter: name}, {}, ready):
                return False
            continue
        looked_at: ast.AST = statement.test if isinstance(statement, ast.Assert) else statement
        if not _collect_expression(looked_at, names, ready):
            return False
    return True


def _find_check(
    statement: ast.stmt, names: dict[str, str], functions: dict[str, ast.FunctionDef]
) -> tuple[ast.FunctionDef, str, str] | None:
    """Find ``check(candidate)``, HumanEval's form: the function, its parameter, and what it is given."""
    match statement:
        case ast.Expr(ast.Call(ast.Name(check), [ast.Name(given)], [])) if check in functions and given in names:
            parameters = functions[check].args.args
            return (functions[check], parameters[0].arg, names[given]) if len(parameters) == 1 else None
    return None


def _collect_expression(node: ast.AST, names: dict[str, str], ready: list[str]) -> bool:
    if isinstance(node, _LATER):
        return not any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        for argument in [*node.args, *(k.value for k in node.keywords)]:
            if not _collect_expression(argument, names, ready):
                return False
        request = _build_request(node, names[node.func.id])
        ready += [request] if request is not None else []
        return request is not None
    if isinstance(node, ast.Name):
        return node.id not in names
    return all(_collect_expression(child, names, ready) for child in ast.iter_child_nodes(node))


def _build_request(node: ast.Call, name: str) -> str | None:
    """Build the request of a call with constants, as the examiner would; ``None``: it has others."""
    try:
        given = [_encode(ast.literal_eval(argument)) for argument in node.args]
        named = {str(k.arg): _encode(ast.literal_eval(k.value)) for k in node.keywords if k.arg is not None}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if len(named) < len(node.keywords):
        return None
    return json.dumps(["call", {"n": name}, given, named])


def _encode(value: Value) -> Value:
    return plain_data.encode_value(value, _refuse)


def _refuse(value: Value) -> Value:
    raise TypeError(f"{type(value).__name__} is no constant")
