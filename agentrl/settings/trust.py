"""Trust in a run folder: whether settings in it that mean code, or reach out, may be followed.

A run folder may come from a stranger. Settings that load code, start a program, or connect to somewhere are followed
where this user made the run, or said ``--trust`` for it. What is remembered is a digest, a file each in the user's
state folder, so that a folder which was edited is not trusted any more.

A digest covers those settings, and the files of code that they name: by the contents of these and of the code beside
them, where the user said ``--trust``; by where they lie, where the user made the run, who may go on editing files of
their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, describe_missing_run
from agentrl.settings.documents import read_toml_table
from agentrl.settings.loader import Layer, flatten, is_setting
from agentrl.settings.registry import RegistryKind, is_own, list_registered, load_registered
from agentrl.settings.user_folders import locate_state_folder

_KINDS: Mapping[str, RegistryKind] = {  # settings that name a thing which is registered, or code
    "learner.loss": "loss",
    "learner.advantage": "advantage",
    "learner.importance_sampling_mode": "importance_sampling",
    "learner.optimizer": "optimizer",
    "rollout.sampler": "sampler",
    "rollout.context": "context",
    "players.launcher": "player_launcher",
    "call_format": "call_format",
    "run.callbacks": "callback",
    "run.metrics": "metric",
    "tools": "tool",
}
_LOADING = ("gym", "openenv")  # environments that import, or connect to, what they are given
_LOCAL_ENGINES = ("auto", "transformers", "vllm")
_ALWAYS = (  # name code, or a place to write to
    *("rollout.curriculum", "run.trackers", "run.fallback_dir", "engine.urls", "players.host"),
    *("load.trust_remote_code", "load.attn_implementation"),  # the latter may name kernels on the hub
)
_IMPORT = re.compile(r"\.py:|(?:^|,)\s*[^\s:,]+:[^\s:,]+\s*(?:$|,)")  # file.py:name, module:name
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://|^\s*(?:mcp|remote|openenv):", re.I)
_OF_ENV = re.compile(r"(?:^|\.)env\.(\w+)")
_REACHING = (
    "data",
    "test_data",
    "data_files",
    "url",
    "reward_settings",
)  # of an environment: read or fetched from there
_MOST_FILES, _MOST_BYTES = 2_000, 64 << 20  # of code beside a file


def read_run_layer(folder: Path, given: Mapping[str, Any], *, trust: bool = False) -> Layer:
    """Read the settings of a run folder as a layer.

    Args:
        given: the settings that later layers give; what they replace is not looked at.
        trust: follow settings that mean code, and remember that.

    Raises:
        UserError: they cannot be read; or they mean code, and are not trusted: the sentence lists them.
    """
    path = folder / "config.toml"
    try:
        settings = read_toml_table(path)
    except FileNotFoundError:
        raise UserError(describe_missing_run(folder)) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no valid TOML: {error}") from None
    meant = _leave_out_replaced(list_code_settings(settings), given)
    if not meant:
        return str(path), settings
    if trust:
        remember(list_code_settings(settings))
    elif not _is_remembered(list_code_settings(settings)):
        shown = ", ".join(f"{name} = {value!r:.100}" for name, value in list(meant.items())[:8])
        more = f" and {len(meant) - 8} more" if len(meant) > 8 else ""
        raise UserError(
            f"{path} was not written by a run of yours here, or was changed since, and would load code, start a "
            f"program or connect to somewhere: {shown}{more}. Nothing was run. If you know what they do, add --trust, "
            "which is remembered until they change; or give settings of your own instead: --NAME VALUE"
        )
    return str(path), settings


def remember_run(settings: Mapping[str, Any]) -> None:
    """Remember that this user made a run with these settings. Where nothing can be written, nothing is remembered."""
    if meant := list_code_settings(settings):
        _write(_digest_places(meant))


def remember(meant: Mapping[str, Any]) -> None:
    """Remember that these settings are trusted, with the code that they name as it is now."""
    if (digest := _digest_contents(meant)) is not None:
        _write(digest)


def list_code_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """List settings that load code, start a program, write elsewhere or connect, by their dotted names."""
    meant: dict[str, Any] = {}
    for name, value in flatten(settings).items():
        if name == "stages" and isinstance(value, list):
            for number, stage in enumerate(value):
                if isinstance(stage, dict):
                    meant |= list_code_settings(stage, f"{prefix}stages.{number}.")
        elif _means_code(name, value, in_stage=bool(prefix)):
            meant[prefix + name] = value
    return meant


def _means_code(name: str, value: Any, *, in_stage: bool) -> bool:
    if name in ("env", "env.name") or re.fullmatch(r"eval\.sets\..*\.env(\.name)?", name):
        return not all(map(_is_registered_env, _list_texts(value)))
    if name.startswith("tool.") or name in _ALWAYS:
        return bool(value)
    if name in _KINDS:
        return not all(_is_known(_KINDS[name], text) for part in _list_texts(value) for text in part.split(","))
    if name in ("engine", "engine.name"):
        return value not in _LOCAL_ENGINES
    if not (name.startswith(("env.", "eval.sets.")) or in_stage or is_setting(name)):
        return True  # no run writes a setting that there is not
    if name.startswith("engine.args.") and not isinstance(value, int | float):
        return True
    if own := _OF_ENV.search(name):
        if own[1] in ("rewards", "gate", "tools"):
            return not all(_is_listed(text) for texts in _list_texts(value) for text in texts.split(","))
        if own[1] in _REACHING and not isinstance(value, bool | int | float):
            return True
    return any(_IMPORT.search(text) or _ADDRESS.search(text) for text in _list_texts(value))


def _is_registered_env(name: str) -> bool:
    family, colon, _ = name.partition(":")
    if family not in list_registered("env") or family in _LOADING:
        return False
    if not colon:
        return True
    try:
        return getattr(load_registered("env", family), "named_by", None) is not None  # else it is module:Class
    except UserError:
        return False


def _is_listed(name: str) -> bool:
    return _is_known("reward", name) or _is_known("tool", name)


def _is_known(kind: RegistryKind, name: str) -> bool:
    name = name.strip()
    return not name or is_own(kind, name) or (":" not in name and name in list_registered(kind))


def _list_texts(value: Any) -> list[str]:
    """List the texts in a value, the names in tables too."""
    texts, left = [], [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return texts


def _leave_out_replaced(meant: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what the given settings replace: each by its name, and with an environment all of its settings."""
    own = flatten(given)
    replaces_env = "env.name" in own or "env" in own
    return {
        name: value
        for name, value in meant.items()
        if name not in own and not (replaces_env and (name == "env" or name.startswith("env.")))
    }


def _digest_places(meant: Mapping[str, Any]) -> str:
    places = sorted({str(path.resolve()) for path in _find_code(meant)})
    return _hash(["made", json.dumps(meant, sort_keys=True, default=str), *places])


def _digest_contents(meant: Mapping[str, Any]) -> str | None:
    """Digest the settings and the contents of the code that they name; None where there is too much beside it."""
    parts = ["trusted", json.dumps(meant, sort_keys=True, default=str)]
    for path in sorted({path.resolve() for path in _find_code(meant)}):
        size = 0
        for count, file in enumerate(_list_beside(path)):
            try:
                size += file.stat().st_size
                if count > _MOST_FILES or size > _MOST_BYTES:
                    return None
                parts += [str(file.relative_to(path.parent)), hashlib.sha256(file.read_bytes()).hexdigest()]
            except OSError:
                return None
    return _hash(parts)


def _list_beside(path: Path) -> Iterator[Path]:
    """Yield a file of code, and the code in its folder, which it may import; but not installed packages'."""
    if any(part in ("site-packages", "dist-packages") for part in path.parts) or _is_standard(path):
        yield path
        return
    for folder, folders, names in os.walk(path.parent):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("site-packages", "node_modules"))
        yield from (p for n in sorted(names) if n.endswith((".py", ".so", ".pyd")) and (p := Path(folder, n)).is_file())


def _is_standard(path: Path) -> bool:
    return path.is_relative_to(Path(os.__file__).resolve().parent)


def _find_code(meant: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files of code that texts among the settings name, without importing anything."""
    for text in _list_texts(dict(meant)):
        for name in text.split(","):
            module, colon, _ = name.strip().partition(":")
            if not colon:
                continue
            if module.endswith(".py"):
                yield Path(module)
            elif re.fullmatch(r"[A-Za-z_][\w.]*", module) and (found := _find_module(module)) is not None:
                yield found


def _find_module(name: str) -> Path | None:
    path: list[str] | None = [os.getcwd(), *sys.path]
    found: Path | None = None
    parts = name.split(".")
    for at in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if spec is None:
            return None
        found = Path(spec.origin) if spec.origin and spec.has_location else found
        path = list(spec.submodule_search_locations or [])
    return found


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _is_remembered(meant: Mapping[str, Any]) -> bool:
    if (folder := _locate()) is None:
        return False
    digests = (_digest_places(meant), _digest_contents(meant))
    return any(digest is not None and (folder / digest).is_file() for digest in digests)


def _write(digest: str) -> None:
    if (folder := _locate()) is None:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / digest).write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"), "utf-8")


def _locate() -> Path | None:
    state = locate_state_folder()
    return state and state / "trusted"
