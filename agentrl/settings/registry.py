"""Names: environments, tools, models and commands by entry point, or by ``module:attribute`` unregistered."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import UserError, nearest

Kind = Literal["env", "tool", "model", "reward", "command"]


def available(kind: Kind) -> dict[str, EntryPoint]:
    """The registered names of the entry-point group ``agentrl.envs``, ``.tools``, ``.models`` or ``.commands``."""
    return {e.name: e for e in entry_points(group=f"agentrl.{kind}s")}


def load(kind: Kind, name: str) -> Any:
    """The object called ``name``: a registered one, or ``module:attribute`` (``file.py:attribute`` too).

    Raises:
        UserError: there is no such name, or importing it failed; the sentence says which.
    """
    known = available(kind)
    if name in known:
        return imported(f"{kind} {name!r}", f"{known[name].module}:{known[name].attr}")
    if ":" not in name:
        raise UserError(f"no {kind} {name!r}{nearest(name, known)} (or say module:attribute)")
    return imported(f"{kind} {name!r}", name)


def member(kind: Kind, name: str) -> tuple[Any, str | None]:
    """The object called ``name``, and ``None``; or, for ``FAMILY:MEMBER``, the family's object and the member's name.

    A family is registered under its own name, and says by ``named_by`` which of its settings the member is.

    Raises:
        UserError: as `load`.
    """
    family, colon, rest = name.partition(":")
    if colon and name not in (known := available(kind)) and family in known:
        found = load(kind, family)
        if getattr(found, "named_by", None) is not None:
            return found, rest
    return load(kind, name), None


def imported(what: str, target: str) -> Any:
    """What ``module:attribute`` or ``file.py:attribute`` means. Raises UserError, which begins with ``what``."""
    module_name, _, attribute = target.partition(":")
    path = Path(module_name) if module_name.endswith(".py") else None
    if path and not path.is_file():
        raise UserError(f"{what}: there is no file {module_name} (from {Path.cwd()})")
    folder = str(path.parent.resolve() if path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_name = path.stem if path else module_name
    try:
        found = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:  # the two others: no module's name at all
        raise UserError(f"{what}: cannot import {module_name!r}: {error}") from error
    if path and path.resolve() != Path(getattr(found, "__file__", None) or "").resolve():
        raise UserError(f"{what}: another module is called {module_name!r} already; give {path} another name")
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in getattr(found, "__dict__", ()) if not n.startswith("_")]
            raise UserError(f"{what}: {module_name!r} has no {part!r}{nearest(part, public)}")
        found = getattr(found, part)
    return found


def check_needs(what: str, thing: Any) -> None:
    """Check the packages that a registered thing declares: ``needs = {"math_verify": "math"}``, modules and extras.

    Args:
        what: how a sentence calls it, such as ``reward 'math'``.

    Raises:
        UserError: a package is missing.
    """
    needs: Mapping[str, str] = getattr(thing, "needs", None) or {}
    for module, extra in needs.items():
        check_package(what, module, extra)


def check_package(what: str, module: str, extra: str) -> None:
    """Raise UserError where a module is not installed; the sentence names the extra that brings it."""
    if find_spec(module) is None:
        package = module.replace("_", "-")
        raise UserError(f"{what} needs the package {package}: pip install 'agentrl-gym[{extra}]'")
