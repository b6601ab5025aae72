"""The plan of a migration: names of TRL's with their values, settings here, and words for a person."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

UNKNOWN = "TODO"  # the value of a setting that a person has to give; nothing of that name is ever found


@dataclass
class Plan:
    """All that was read of a script or a configuration file.

    Args:
        source: the file.
        values: names of TRL's, with their values.
        settings: settings here that need no name of TRL's.
        reasons: where a setting comes from, by its name.
        todo: for a person to do before it trains.
        notes: of no consequence for the training, or without counterpart.
        functions: of the script itself that rewards and tools name.
        processes: that train together.
    """

    source: str
    values: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    processes: int = 1

    def set(self, setting: str, value: object, reason: str) -> None:
        """Add a setting, and where it comes from."""
        self.settings[setting] = value
        self.reasons[setting] = reason

    def move_functions(self, script: Path, file: Path) -> None:
        """Name the functions of a script by another file that holds them now."""
        for setting in ("env.rewards", "tools"):
            names = self.settings.get(setting)
            if isinstance(names, list):
                self.settings[setting] = [str(n).replace(f"{script}:", f"{file}:") for n in names]
        self.todo = [t for t in self.todo if not t.startswith(f"importing {script} ")]
