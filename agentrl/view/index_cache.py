"""The index of a long run, kept in its folder, so that the next look need not read a thousand files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from agentrl.view.index import SCHEMA

FILE = "view-index.arrow"
_KEY = b"agentrl_view_index"
_FORMAT = 1


class Mark(NamedTuple):
    """By which a file that was written anew is known."""

    mtime_ns: int
    size: int


def read_kept(folder: Path, marks: Mapping[str, Mark]) -> dict[str, tuple[Mark, Any]]:
    """The tables of the files that are still as they were; none where nothing (readable) was kept."""
    try:
        with pa.memory_map(str(folder / FILE)) as file:
            table = pa.ipc.open_file(file).read_all()
        said = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
    except (OSError, ValueError, pa.ArrowException):
        return {}
    if said.get("format") != _FORMAT or not table.schema.equals(SCHEMA):
        return {}
    found, start = {}, 0
    table = table.replace_schema_metadata(None)
    for name, mtime_ns, size, rows in said["files"]:
        if marks.get(name) == (mtime_ns, size):
            found[name] = (Mark(mtime_ns, size), table.slice(start, rows))
        start += rows
    return found


def write_kept(folder: Path, files: Mapping[str, tuple[Mark, Any]]) -> None:
    """Keep them, aside and then renamed; in a folder that cannot be written nothing is kept, and nothing lost."""
    said = {"format": _FORMAT, "files": [[name, *mark, table.num_rows] for name, (mark, table) in files.items()]}
    table = pa.concat_tables([table for _, table in files.values()])
    table = table.replace_schema_metadata({_KEY: json.dumps(said).encode()})
    aside = folder / f".{FILE}-{os.getpid()}"
    try:
        with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        aside.replace(folder / FILE)
    except OSError:
        aside.unlink(missing_ok=True)
