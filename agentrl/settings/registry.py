"""Names: environments, tools, models and commands by entry point, or by ``module:attribute`` unregistered."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import UserError, describe_raised, suggest

RegistryKind = Literal["env", "tool", "model", "reward", "command", "panel", "metric"]


def list_registered(kind: RegistryKind) -> dict[str, EntryPoint]:
    """List what is registered in the entry-point group ``agentrl.envs``, ``.tools``, ``.models`` or ``.commands``."""
    return {e.name: e for e in entry_points(group=f"agentrl.{kind}s")}


def load_registered(kind: RegistryKind, name: str) -> Any:
    """Load the object called ``name``: a registered one, or ``module:attribute`` (``file.py:attribute`` too).

    Raises:
        UserError: there is no such name, or importing it failed; the sentence says which.
    """
    known = list_registered(kind)
    if name in known:
        return import_object(f"{kind} {name!r}", f"{known[name].module}:{known[name].attr}")
    if ":" not in name:
        raise UserError(f"no {kind} {name!r}{suggest(name, known)} (or say module:attribute)")
    return import_object(f"{kind} {name!r}", name)


def load_member(kind: RegistryKind, name: str) -> tuple[Any, str | None]:
    """Load the object called ``name``; for ``FAMILY:MEMBER`` the family's object, with the member's name beside it.

    A family is registered under its own name, and says by ``named_by`` which of its settings the member is.

    Raises:
        UserError: as `load_registered`.
    """
    family, colon, rest = name.partition(":")
    if colon and name not in (known := list_registered(kind)) and family in known:
        loaded = load_registered(kind, family)
        if getattr(loaded, "named_by", None) is not None:
            return loaded, rest
    return load_registered(kind, name), None


def derive_settings_key(name: str) -> str:
    """Return the word by which settings name a tool: ``mcp`` of ``mcp:URL``, ``notes`` of ``my.notes:Notes``."""
    before = name.partition(":")[0]
    return Path(before).stem if before.endswith(".py") else before.rpartition(".")[2]


def import_object(what: str, target: str) -> Any:
    """Import ``module:attribute`` or ``file.py:attribute``. Raises UserError, which begins with ``what``."""
    module_name, _, attribute = target.partition(":")
    path = Path(module_name) if module_name.endswith(".py") else None
    if path and not path.is_file():
        raise UserError(f"{what}: there is no file {module_name} (from {Path.cwd()})")
    folder = str(path.parent.resolve() if path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_name = path.stem if path else module_name
    try:
        loaded = importlib.import_module(module_name)
    except UserError:
        raise
    except (ImportError, ValueError, TypeError) as error:  # the two others: no module's name at all
        raise UserError(f"{what}: cannot import {module_name!r}: {error}") from error
    except (Exception, SystemExit) as error:  # a script that ends as it is imported
        raise UserError(f"{what}: cannot import {module_name!r}: {describe_raised(error)}") from error
    if path and path.resolve() != Path(getattr(loaded, "__file__", None) or "").resolve():
        raise UserError(f"{what}: another module is called {module_name!r} already; give {path} another name")
    for part in attribute.split("."):
        if not hasattr(loaded, part):
            public = [n for n in getattr(loaded, "__dict__", ()) if not n.startswith("_")]
            raise UserError(f"{what}: {module_name!r} has no {part!r}{suggest(part, public)}")
        loaded = getattr(loaded, part)
    return loaded


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
