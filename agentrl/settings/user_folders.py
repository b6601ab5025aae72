"""The folders of a user's own in which agentrl keeps things between commands, as the XDG base directories have them."""

from __future__ import annotations

import os
from pathlib import Path


def locate_state_folder() -> Path | None:
    """Return the folder of what is remembered; None for a user without a home."""
    return _locate("XDG_STATE_HOME", ".local/state")


def locate_cache_folder() -> Path | None:
    """Return the folder of what can be made again; None for a user without a home."""
    return _locate("XDG_CACHE_HOME", ".cache")


def locate_data_folder() -> Path | None:
    """Return the folder of what was installed; None for a user without a home."""
    return _locate("XDG_DATA_HOME", ".local/share")


def _locate(variable: str, default: str) -> Path | None:
    if (given := os.environ.get(variable, "")).startswith("/"):
        return Path(given) / "agentrl"
    try:
        return Path.home() / default / "agentrl"
    except RuntimeError:
        return None
