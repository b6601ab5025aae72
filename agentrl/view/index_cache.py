"""The cache of a long run's index, in its folder, so that the next reader need not read a thousand files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from agentrl.view.index import SCHEMA

FILE = "view-index.arrow"
_KEY = b"agentrl_view_index"
_FORMAT = 2


class FileStamp(NamedTuple):
    """The time and size by which a file that was rewritten is recognized."""

    mtime_ns: int
    size: int


def read_cached_index(folder: Path, stamps: Mapping[str, FileStamp]) -> dict[str, tuple[FileStamp, pa.Table]]:
    """Read the tables of the files that did not change; none if there is no readable cache."""
    try:
        with pa.memory_map(str(folder / FILE)) as file:
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
    """Write the tables atomically; in a folder that cannot be written, do nothing."""
    header = {"format": _FORMAT, "files": [[name, *stamp, table.num_rows] for name, (stamp, table) in files.items()]}
    table = pa.concat_tables([table for _, table in files.values()])
    table = table.replace_schema_metadata({_KEY: json.dumps(header).encode()})
    partial_path = folder / f".{FILE}-{os.getpid()}"
    try:
        with pa.OSFile(str(partial_path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        partial_path.replace(folder / FILE)
    except OSError:
        partial_path.unlink(missing_ok=True)
