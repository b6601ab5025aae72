"""The cache of a long run's index, so that the next reader need not read a thousand files.

It is in the user's own cache folder: what lies in a run folder may be a stranger's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from agentrl.settings.user_folders import locate_cache_folder
from agentrl.view.index import SCHEMA

_KEY = b"agentrl_view_index"
_FORMAT = 2


class FileStamp(NamedTuple):
    """The time and size by which a file that was rewritten is recognized."""

    mtime_ns: int
    size: int


def read_cached_index(folder: Path, stamps: Mapping[str, FileStamp]) -> dict[str, tuple[FileStamp, pa.Table]]:
    """Read the tables of the files that did not change; none if there is no readable cache."""
    if (path := locate_index(folder)) is None:
        return {}
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        header = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
    except (OSError, ValueError, pa.ArrowException):
        return {}
    if header.get("format") != _FORMAT or not table.schema.equals(SCHEMA):
        return {}
    tables, start = {}, 0
    table = table.replace_schema_metadata(None)
    for name, mtime_ns, size, rows in header["files"]:
        if stamps.get(name) == (mtime_ns, size):
            tables[name] = (FileStamp(mtime_ns, size), table.slice(start, rows))
        start += rows
    return tables


def write_cached_index(folder: Path, files: Mapping[str, tuple[FileStamp, pa.Table]]) -> None:
    """Write the tables atomically; where that cannot be, do nothing."""
    if (path := locate_index(folder)) is None or not files:
        return
    header = {"format": _FORMAT, "files": [[name, *stamp, table.num_rows] for name, (stamp, table) in files.items()]}
    table = pa.concat_tables([table for _, table in files.values()])
    table = table.replace_schema_metadata({_KEY: json.dumps(header).encode()})
    partial_path = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with pa.OSFile(str(partial_path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        partial_path.replace(path)
    except OSError:
        with suppress(OSError):
            partial_path.unlink(missing_ok=True)


def locate_index(folder: Path) -> Path | None:
    """Return the path of the index of a run folder; None for a user without a home."""
    caches = locate_cache_folder()
    name = blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
    return caches and caches / "index" / f"{name}.arrow"
