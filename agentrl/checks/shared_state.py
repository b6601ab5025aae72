"""Snapshots of all state that outlives an episode: attributes of classes, globals of modules, default arguments."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from agentrl.tools.tool import Tool

NODES = 50_000  # of one root; the rest is not looked at
_OWN = ("builtins", "abc", "typing", "agentrl")
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def take_snapshot(
    classes: Iterable[type], tools: Iterable[Tool] = (), more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return values by name, such as ``Shop.seen`` or ``shop_module._cache``, each equal while nothing changed.

    Args:
        more: further roots, by the name that a finding uses.
    """
    values: dict[str, Any] = {name: _freeze(value) for name, value in (more or {}).items()}
    own = [c for cls in classes for c in cls.__mro__ if not _is_own(c.__module__)]
    functions = [_plain_function(t) for t in tools]
    for cls in own:
        values |= _freeze_class(cls)
    for name in {c.__module__ for c in own} | {f.__module__ for f in functions if not _is_own(f.__module__)}:
        values |= _freeze_module(sys.modules[name]) if name in sys.modules else {}
    for function in functions:
        values[f"the defaults of {function.__qualname__}"] = _freeze(_defaults(function))
    return values


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names whose value differs, or that are new."""
    return sorted(name for name in after if name not in before or before[name] != after[name])


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN


def _plain_function(tool: Tool) -> Any:
    return tool.function.func if isinstance(tool.function, partial) else tool.function


def _freeze_class(cls: type) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(cls).items():
        function = value.function if isinstance(value, Tool) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            values[f"the defaults of {cls.__name__}.{name}"] = _freeze(_defaults(function))
        elif not (name.startswith(("__", "_abc_")) or _is_code(value)):
            values[f"{cls.__name__}.{name}"] = _freeze(value)
    return values


def _freeze_module(module: ModuleType) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            values |= _freeze_class(value)
        elif not (name.startswith("__") or _is_code(value)):
            values[f"{module.__name__}.{name}"] = _freeze(value)
    return values


def _is_code(value: Any) -> bool:
    return isinstance(value, type | ModuleType | Tool | property) or callable(value) or inspect.isdatadescriptor(value)


def _defaults(function: Any) -> Any:
    return getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)


def _freeze(value: Any) -> Any:
    """Return a value that equals another one exactly if their contents are equal, as far as contents can be seen."""
    return _Freeze().of(value)


class _Freeze:
    def __init__(self) -> None:
        self.left, self.inside = NODES, set[int]()

    def of(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value) if isinstance(value, float) else value  # nan is nan
        self.left -= 1
        if self.left < 0 or id(value) in self.inside or _is_code(value):
            return type(value).__name__
        self.inside.add(id(value))
        try:
            return type(value).__name__, self._contents(value)
        finally:
            self.inside.discard(id(value))

    def _contents(self, value: Any) -> Any:
        if isinstance(value, list | tuple | deque):
            return [self.of(v) for v in value]
        if isinstance(value, dict):
            return [(self.of(k), self.of(v)) for k, v in list(value.items())]
        if isinstance(value, set | frozenset):
            return sorted((self.of(v) for v in value), key=repr)
        if isinstance(value, random.Random):
            return value.getstate()
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # an array
            return str(value.dtype), value.tobytes()
        slots = {
            n: getattr(value, n, None)
            for c in type(value).__mro__
            for n in getattr(c, "__slots__", ())
            if n != "__dict__"
        }
        attributes = {**getattr(value, "__dict__", {}), **slots}
        if attributes or hasattr(value, "__dict__"):
            return self.of(attributes)
        text = repr(value)
        return "" if " at 0x" in text else text[:200]
