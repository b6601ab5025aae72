"""A user's own folders are where the XDG variables say, or below the home folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.settings.user_folders import locate_cache_folder, locate_state_folder


def test_the_variables_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/a/state")
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/cache")
    assert locate_state_folder() == Path("/a/state/agentrl")
    assert locate_cache_folder() == Path("/a/cache/agentrl")


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_else_they_are_below_the_home_folder(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is none, as the XDG specification has it."""
    monkeypatch.setenv("HOME", "/home/somebody")
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, value)
    assert locate_state_folder() == Path("/home/somebody/.local/state/agentrl")
    assert locate_cache_folder() == Path("/home/somebody/.cache/agentrl")


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", raise_error)
    assert locate_state_folder() is None
    assert locate_cache_folder() is None
