"""Names: environments, tools and models by entry point, or by ``module:attribute`` without any registration."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import UserError, nearest

Kind = Literal["env", "tool", "model"]


def available(kind: Kind) -> dict[str, EntryPoint]:
    """The registered names of the entry-point group ``agentrl.envs``, ``agentrl.tools`` or ``agentrl.models``."""
    return {e.name: e for e in entry_points(group=f"agentrl.{kind}s")}


def load(kind: Kind, name: str) -> Any:
    """The object called ``name``: a registered one, or ``module:attribute`` (``file.py:attribute`` too).

    Raises:
        UserError: there is no such name, or importing it failed; the sentence says which.
    """
    known = available(kind)
    if name in known:
        return _import(kind, name, known[name].value)
    if ":" not in name:
        raise UserError(f"no {kind} {name!r}{nearest(name, known)} (or say module:attribute)")
    return _import(kind, name, name)


def _import(kind: Kind, name: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise UserError(f"{kind} {name!r}: there is no file {module_name}")
        sys.path.insert(0, str(path.parent.resolve()))
        module_name = path.stem
    elif str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{kind} {name!r}: cannot import {module_name!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{kind} {name!r}: {module_name!r} has no {part!r}{nearest(part, vars(found))}")
        found = getattr(found, part)
    return found
