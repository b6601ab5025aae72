"""Demonstrations from files of conversations and from run folders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.environments.spec import EnvSpec
from agentrl.errors import UserError, suggest
from agentrl.library.run import Run
from agentrl.rollout.demonstration import Demonstration
from agentrl.settings.documents import parse_json, read_json
from agentrl.settings.schema import TrainConfig
from agentrl.settings.sft import EXPERT
from agentrl.types import JsonSchema

_OPERATOR = re.compile(r"\s*(<=|>=|!=|<|>|=)\s*")
_SUFFIXES = (".jsonl", ".json", ".parquet")


def read_demonstrations(config: TrainConfig, spec: EnvSpec) -> list[Demonstration]:
    """Read the demonstrations of ``sft.data``, but for the expert's, which it plays in the run.

    Raises:
        UserError: there is no such file or folder, or a row is no conversation; the sentence names it.
    """
    sft, found = config.sft, list[Demonstration]()
    for name in sft.data:
        path = Path(name)
        if name == EXPERT:
            continue
        if path.is_dir():
            found += _read_run(path, sft.where, spec)
        elif path.is_file():
            found += _read_file(path)
        else:
            hint = suggest(name, [EXPERT]) if "/" not in name and "." not in name else ""
            raise UserError(f"sft.data: there is no file or run folder {name!r} (from {Path.cwd()}){hint}")
    return found


def _read_run(folder: Path, where: str | None, spec: EnvSpec) -> list[Demonstration]:
    """Read the episodes of a run folder that a query matches, in their order; none that a fault ended."""
    episodes = Run(folder).episodes(_OPERATOR.sub(r"\1", where) if where else "")
    tools = _find_tools(folder, spec)
    whole = [t for t in episodes if t.fault is None and t.turns]
    found = [one for t in whole for one in Demonstration.list_of_trajectory(t, tools)]
    if not found:
        which = f"no episode of {str(folder)!r} matches {where!r}" if where else f"{str(folder)!r} has no episode"
        raise UserError(f"{which} that a fault did not end: sft.where takes what the search of agentrl view takes")
    return found


def _find_tools(folder: Path, spec: EnvSpec) -> Sequence[JsonSchema]:
    """Return the tools that a run's episodes were offered; the environment's where its folder does not say.

    Raises:
        UserError: it offered several lists of them, and does not say which episode had which.
    """
    try:
        offered = read_json(folder / "tools.json")
    except (OSError, ValueError):
        offered = None
    lists = offered if isinstance(offered, list) and all(isinstance(one, list) for one in offered) else []
    if len(lists) > 1:
        raise UserError(
            f"sft.data: the episodes of {str(folder)!r} were offered {len(lists)} different lists of tools, and it "
            "does not say which had which; give a file of conversations with their `tools`"
        )
    return lists[0] if lists else [t.schema for t in spec.tool_list()]


def _read_file(path: Path) -> list[Demonstration]:
    if path.suffix not in _SUFFIXES:
        raise UserError(f"sft.data: {str(path)!r} is no file of conversations; they end in {', '.join(_SUFFIXES)}")
    found = []
    for number, row in _read_rows(path):
        try:
            if not isinstance(row, Mapping):
                raise UserError(f"it is {row!r:.60}; a row is an object")
            found.append(Demonstration.parse(row))
        except UserError as error:
            raise UserError(f"sft.data: row {number} of {str(path)!r}: {error}") from None
    if not found:
        raise UserError(f"sft.data: {str(path)!r} has no rows")
    return found


def _read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file, with their numbers. Raises UserError for what cannot be read."""
    try:
        if path.suffix == ".parquet":
            yield from enumerate(map(_drop_nulls, pq.read_table(path).to_pylist()), 1)
        elif path.suffix == ".json":
            yield from enumerate(_as_list(parse_json(path.read_text(encoding="utf-8"))), 1)
        else:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if line.strip():
                    yield number, _parse_line(path, number, line)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        why = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise UserError(f"sft.data: cannot read {str(path)!r}: {why}") from None


def _parse_line(path: Path, number: int, line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise UserError(f"sft.data: line {number} of {str(path)!r} is no JSON: {error}") from None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _drop_nulls(value: Any) -> Any:
    """Drop what Arrow fills in: a row's objects have the keys of all rows there."""
    if isinstance(value, Mapping):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value
