"""Names of whatever is chosen by name: environments, tools, losses, engines ...

A name is one of agentrl's own, an entry point of a package, or ``module:attribute`` (``file.py:attribute`` too).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import ContractError, UserError, describe_raised, suggest
from agentrl.settings.entries import Entry, as_entry

EntryKind = Literal[
    "loss",
    "advantage",
    "importance_sampling",
    "optimizer",
    "sampler",
    "engine",
    "call_format",
    "context",
    "player_launcher",
    "run_launcher",
]
_PlainKind = Literal["env", "tool", "model", "reward", "command", "callback", "panel", "metric", "launcher", "gpu"]
RegistryKind = _PlainKind | EntryKind
_OWN = "agentrl-gym"  # the distribution whose names no other package takes
_GROUPS = {"loss": "losses", "importance_sampling": "importance_sampling"}  # entry points of any other kind end in s
_MODULES: Mapping[str, Sequence[str]] = {  # whose entries are agentrl's own; they load no torch
    "loss": ("agentrl.learner.losses.losses",),
    "advantage": tuple(f"agentrl.learner.advantages.{name}" for name in ("group", "turn", "imitation")),
    "importance_sampling": ("agentrl.learner.losses.correction",),
    "optimizer": ("agentrl.learner.named_optimizers",),
    "sampler": ("agentrl.environments.curriculum",),
    "engine": ("agentrl.engines.factories",),
    "call_format": ("agentrl.models.call_formats",),
    "context": ("agentrl.rollout.folding",),
    "player_launcher": ("agentrl.players.launchers",),
    "run_launcher": ("agentrl.launch.run_launchers",),
}


@cache
def _list_own(kind: str) -> Mapping[str, EntryPoint]:
    """List agentrl's own entries of a kind: the public ones of its modules."""
    listed: dict[str, EntryPoint] = {}
    for module in _MODULES.get(kind, ()):
        for name, thing in vars(importlib.import_module(module)).items():
            if isinstance(thing, Entry) and thing.kind == kind and not name.startswith("_"):
                listed.setdefault(name, EntryPoint(name, f"{module}:{name}", _group(kind)))
    return listed


def list_registered(kind: RegistryKind) -> dict[str, EntryPoint]:
    """List what is registered: agentrl's own, and the entry points of ``agentrl.envs``, ``agentrl.losses`` ..."""
    return {**{e.name: e for e in _list_installed(kind)}, **_list_own(kind)}


def _list_installed(kind: str) -> Sequence[EntryPoint]:
    """List the entry points of a kind, agentrl's last. Folders on the path that did not change are not read again."""
    installed = _read_entry_points(tuple((folder, _modified_ns(folder)) for folder in sys.path))
    return installed.get(_group(kind), ())


@lru_cache(maxsize=4)
def _read_entry_points(path: Sequence[tuple[str, int]]) -> Mapping[str, Sequence[EntryPoint]]:
    found = entry_points()
    groups = [group for group in found.groups if group.startswith("agentrl.")]
    return {group: sorted(found.select(group=group), key=_is_own) for group in groups}


def _modified_ns(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except (OSError, ValueError):
        return 0


def _group(kind: str) -> str:
    return f"agentrl.{_GROUPS.get(kind, f'{kind}s')}"


def _is_own(entry: EntryPoint) -> bool:
    return entry.dist is not None and entry.dist.name == _OWN


def is_own(kind: RegistryKind, name: str) -> bool:
    """Return True for an entry that is part of agentrl: it is safe and quick to load."""
    return name in _list_own(kind)


def list_own(kind: RegistryKind) -> list[str]:
    """List the names of agentrl's own entries, without looking at what is installed, which takes a while."""
    return list(_list_own(kind))


def check_name(kind: RegistryKind, name: str) -> str:
    """Return a name if something may be called so; nothing of others is imported. Raises UserError if not."""
    if name in _list_own(kind):
        return name
    known = list_registered(kind)
    module, colon, attribute = name.partition(":")
    if name not in known and not (colon and module and attribute):
        raise UserError(f"no {_say(kind)} {name!r}{suggest(name, known)} (or say module:function)")
    return name


def _say(kind: str) -> str:
    return kind.replace("_", " ")


def load_registered(kind: RegistryKind, name: str) -> Any:
    """Load the object called ``name``: a registered one, or ``module:attribute`` (``file.py:attribute`` too).

    Raises:
        UserError: there is no such name, several packages register it, or importing it failed.
    """
    known = _list_own(kind)
    known = known if name in known else list_registered(kind)
    what = f"{_say(kind)} {name!r}"
    if name in known:
        _check_unique(kind, name, known[name])
        return import_object(what, f"{known[name].module}:{known[name].attr}")
    if ":" not in name:
        raise UserError(f"no {what}{suggest(name, known)} (or say module:attribute)")
    return import_object(what, name)


def _check_unique(kind: RegistryKind, name: str, entry: EntryPoint) -> None:
    """Raise UserError if several packages register a name that is none of agentrl's own."""
    if is_own(kind, name) or _is_own(entry):
        return
    others = {e.value: e.dist.name if e.dist else "?" for e in _list_installed(kind) if e.name == name}
    if len(others) > 1:
        offers = " and ".join(f"{package} ({value})" for value, package in sorted(others.items()))
        raise UserError(f"{_say(kind)} {name!r} is registered by {offers}; say which: {min(others)}")


def load_entry(kind: EntryKind, name: str | Callable[..., object]) -> Entry:
    """Load the entry called ``name``, or the function itself; a plain one gets the defaults of its kind.

    Raises:
        UserError: as `load_registered`, or it is something else, or a parameter of it has no type.
    """
    thing = load_registered(kind, name) if isinstance(name, str) else name
    try:
        entry = as_entry(kind, thing)
        entry.arguments  # noqa: B018 - its parameters have types, or are refused here
    except ContractError as error:
        raise ContractError(f"{_say(kind)} {name!r}: {error}") from None
    return entry


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
