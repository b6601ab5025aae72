"""The folder for what has no room in the run's: checked before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.runs.disk import prepare_fallback

OTHER = Path("/dev/shm")


def test_a_fallback_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.fallback_dir '.*/file': it is a file; name a folder that can be"):
        prepare_fallback(tmp_path / "run", tmp_path / "file")


def test_a_fallback_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.fallback_dir '/proc/agentrl': .*; name a folder that can be written"):
        prepare_fallback(tmp_path, Path("/proc/agentrl"))


def test_a_fallback_on_the_same_disk_is_refused_as_it_would_do_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is on the disk of the run folder, and so as full as that"):
        prepare_fallback(tmp_path / "runs" / "a", tmp_path / "other")


def test_a_fallback_on_another_disk_is_made(tmp_path: Path) -> None:
    if not OTHER.is_dir() or OTHER.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one disk")
    folder = OTHER / f"agentrl-{tmp_path.name}"
    prepare_fallback(tmp_path / "run", folder)
    folder.rmdir()
