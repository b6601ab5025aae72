"""TOML and JSON that somebody else wrote, read within bounds of size and depth. What is beyond them is a ValueError."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from errno import EISDIR
from io import BufferedReader
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

MAX_BYTES = 16 << 20  # of a JSON document
MAX_TOML_BYTES = 1 << 20
MAX_DEPTH = 100  # tables and lists in each other
_MAX_KEY_PARTS = 32  # of a dotted key; tomllib takes quadratic time for them
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}[ \t]*\.[ \t]*){{{_MAX_KEY_PARTS}}}")
_INTEGERS = range(-(1 << 63), 1 << 63)


def read_bounded(path: Path, limit: int = MAX_BYTES) -> str:
    """Read a file's text.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than ``limit`` bytes, no regular file, or no UTF-8.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit >> 20} MiB")
    return content.decode("utf-8")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read. Raises OSError, and ValueError where it is a pipe or a device."""
    return open(path, "rb", opener=_open_at_once)


def _open_at_once(path: str, flags: int) -> int:
    """Open a regular file. A pipe would wait for somebody who writes, a device may never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not S_ISREG(mode):
        os.close(descriptor)
        if S_ISDIR(mode):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), path)
        raise ValueError("it is no regular file")
    return descriptor


def read_bounded_lines(path: Path, limit: int = MAX_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file but for those that are longer than ``limit`` bytes. Raises OSError and ValueError."""
    with open_regular(path) as file:
        is_rest = False
        while line := file.readline(limit):
            is_whole = line.endswith(b"\n") or len(line) < limit
            if is_whole and not is_rest:
                yield line
            is_rest = not is_whole


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError: it is none, or is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError: it is none, too large, nested too deeply, or a number has more than 64 bits."""
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it is larger than {MAX_TOML_BYTES >> 20} MiB")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {_MAX_KEY_PARTS} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    check_depth(table, integers=_INTEGERS)
    return table


def read_toml_table(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises OSError and ValueError as `read_bounded` and `parse_toml`."""
    return parse_toml(read_bounded(path, MAX_TOML_BYTES))


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError and ValueError as `read_bounded` and `parse_json`."""
    return parse_json(read_bounded(path))


def check_depth(value: Any, *, integers: range | None = None) -> None:
    """Check that tables and lists are nested `MAX_DEPTH` deep at most; and the integers, where a range is given.

    Raises:
        ValueError: they are not.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif integers is not None and isinstance(one, int) and one not in integers:
                raise ValueError("a whole number has more than 64 bits")
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
