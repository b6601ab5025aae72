"""Names of other libraries in a run's settings: taken out, translated, and put back under the names used here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import ConfigError
from agentrl.settings.names.translation import RULES, Translation, find_name, list_joint_inputs, translate

_READ_FROM = {"num_generations": "rollout.group_size", "num_iterations": "learner.num_iterations"}
_READ_FROM |= {"loss_type": "learner.loss"}  # names that rules read: the settings here that they are


class Adoption:
    """The foreign names of a config's layers, in the order of the layers.

    Args:
        is_known: True for a dotted name that is a setting here.
        is_environments: True for a name that is a setting of the run's own environment.
    """

    def __init__(self, is_known: Callable[[str], bool], is_environments: Callable[[str], bool]) -> None:
        self._is_known, self._is_environments = is_known, is_environments
        self._given: dict[str, object] = {}
        self.lines: list[str] = []

    def adopt(self, source: str, leaves: dict[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
        """Return a layer's leaves with every foreign name translated.

        Args:
            merged: what earlier layers set, by dotted name.

        Raises:
            ConfigError: a name is for something that is not here, or one setting is given twice.
        """
        foreign = {name: value for name, value in leaves.items() if self._is_foreign(name)}
        if not foreign:
            return leaves
        own = {name: value for name, value in leaves.items() if name not in foreign}
        self._given |= foreign
        done = translate(
            {**self._list_related(foreign), **foreign},
            frozenset(foreign),
            known=self._read_own({**merged, **own}),
            processes=int(os.environ.get("WORLD_SIZE", "1")),
        )
        for name, why in done.refused.items():
            entry = find_name(name)
            kind = "not here: " if entry is not None and entry.kind == "absent" else ""
            raise ConfigError(f"{name}: {kind}{why} [{source}]")
        for setting, names in done.origins.items():
            if setting in own:
                raise ConfigError(f"{' and '.join(names)}: this is {setting}, which is given too; give one [{source}]")
        self.lines += _describe_translation(done, foreign)
        return own | done.settings

    def _is_foreign(self, name: str) -> bool:
        if self._is_known(name) or name.startswith(("env.", "tool.")) or (entry := find_name(name)) is None:
            return False
        return entry.setting.startswith("env.") or not self._is_environments(name)

    def _list_related(self, foreign: Mapping[str, object]) -> dict[str, object]:
        """Return what earlier layers gave of the names that a rule reads together with one of this layer."""
        now = {entry.name for name in foreign if (entry := find_name(name))}
        related = {n for rule in RULES if now & {*rule.names, *rule.reads} for n in rule.names}
        return {n: v for n, v in self._given.items() if (entry := find_name(n)) and entry.name in related}

    def _read_own(self, own: Mapping[str, Any]) -> dict[str, object]:
        read = {name: own[setting] for name, setting in _READ_FROM.items() if setting in own}
        return read | {n: v for n, v in self._given.items() if n in list_joint_inputs()}

    def tell(self) -> None:
        """Print a line on stderr for each foreign name, in the first process."""
        if os.environ.get("RANK", "0") == "0":
            for line in self.lines:
                print(f"agentrl: {line}", file=sys.stderr)


def _describe_translation(done: Translation, given: Mapping[str, object]) -> list[str]:
    """Say in a line each what foreign names are here."""
    by_names: dict[tuple[str, ...], list[str]] = {}
    for setting, names in done.origins.items():
        by_names.setdefault(names, []).append(_show(setting, done.settings[setting]))
    lines = []
    for names, ours in by_names.items():
        theirs = ", ".join(_show(name, given.get(name)) for name in names)
        lines.append(f"{theirs} {'is' if len(names) == 1 else 'are'} {', '.join(ours)} here")
    return lines + [f"{_show(name, given.get(name))}: nothing to set: {why}" for name, why in done.remarks.items()]


def _show(name: str, value: object) -> str:
    """Return ``name = value``; the name alone for objects of Python's and long values."""
    listed = value if isinstance(value, list | tuple) else [value]
    if value is None or not all(isinstance(v, str | int | float) for v in listed) or len(repr(value)) > 80:
        return name
    return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"


def take_env_names(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings given in Python: those whose foreign name is a setting of the environment, translated; the others.

    Raises:
        ConfigError: a value has no counterpart.
    """
    names = {n for n in settings if (entry := find_name(n)) and entry.setting.startswith("env.")}
    adoption = Adoption(lambda name: False, lambda name: False)
    taken = adoption.adopt("arguments", {n: settings[n] for n in names}, {})
    adoption.tell()
    ours = {name.removeprefix("env."): value for name, value in taken.items()}
    return ours, {n: v for n, v in settings.items() if n not in names}
