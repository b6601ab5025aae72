"""Documents of strangers are read within bounds, and at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.settings.documents import (
    MAX_DEPTH,
    open_regular,
    parse_json,
    parse_toml,
    read_bounded,
    read_bounded_lines,
    read_json,
)


def test_a_text_within_its_bounds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("\u00e4" * 5)
    assert read_bounded(path, 10) == "\u00e4" * 5
    path.write_text("\u00e4" * 6)
    with pytest.raises(ValueError, match="it is larger than"):
        read_bounded(path, 10)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_bounded(path)


@pytest.mark.parametrize("opened", [read_bounded, open_regular, read_json])
def test_pipes_and_devices_are_refused_and_folders_too(opened: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="it is no regular file"):
            opened(path)
    with pytest.raises(IsADirectoryError):
        opened(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        opened(tmp_path / "loop")


def test_lines_that_are_too_long_are_left_out_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 50 + b"\ntwo\nthree")
    assert list(read_bounded_lines(path, 10)) == [b"one\n", b"two\n", b"three"]


@pytest.mark.parametrize("nested", [MAX_DEPTH + 1, 100_000])
def test_what_is_nested_too_deeply_is_refused(nested: int) -> None:
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_json("[" * (nested + 1) + "]" * (nested + 1))
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_toml("a = " + "[" * (nested + 1) + "]" * (nested + 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a." * 100 + "a = 1", "a key has more than 32 parts"),
        ("a = 99999999999999999999", "more than 64 bits"),
        ("a = 1\na = 2", "Cannot overwrite"),
        ("a = " + "1" * (2 << 20), "larger than 1 MiB"),
    ],
)
def test_toml_beyond_its_bounds_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_toml(text)
