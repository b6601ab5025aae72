"""What the verbs about past runs share: the run's folder, and its settings with others over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, UserError
from agentrl.layers import build, read_overrides, read_toml


def folder(word: str) -> Path:
    """Raises UserError where it is no run folder."""
    found = Path(word)
    if not (found / "config.toml").is_file():
        raise UserError(f"{word!r} is no run folder: it has no config.toml")
    return found


def settings(run: Path, words: Sequence[str], own: Mapping[str, Any]) -> tuple[TrainConfig, dict[str, Any]]:
    """The run's settings with those of the command line over them, and the verb's own, out of ``words``."""
    source, given = read_overrides(words)
    taken = {name: given.get(name, default) for name, default in own.items()}
    for name, default in own.items():
        if default is not None and type(taken[name]) is not type(default):
            raise ConfigError(f"--{name} is such as {default!r}, not {taken[name]!r}")
    rest = {k: v for k, v in given.items() if k not in own}
    return build(read_toml(run / "config.toml"), (source, rest)), taken
