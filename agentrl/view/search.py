"""Search: the episodes of a query, in order, a page at a time."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.errors import UserError, suggest
from agentrl.runs.reader import read_batches
from agentrl.view.index import TEXTS, Column, as_array, as_floats
from agentrl.view.query import NUMBERS, QueryTerm, match_episodes, parse_query
from agentrl.view.store import Snapshot, Store

_CACHED = 16  # results


class EpisodeSearch:
    """Queries on one run; the last results are cached until new data arrives."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._results: OrderedDict[tuple[Any, ...], Column] = OrderedDict()

    def rows(self, query: str = "", sort: str = "") -> tuple[Snapshot, Column]:
        """Return row numbers of the index: the newest step first, or ordered by ``sort`` (``reward``, ``-seconds``).

        Raises:
            UserError: a query or an order that cannot be read.
        """
        now = self.store.now
        key = (now.version, query, sort)
        if key not in self._results:
            self._results[key] = _sort_rows(now.table, self._match(now, query), sort)
            while len(self._results) > _CACHED:
                self._results.popitem(last=False)
        return now, self._results[key]

    def _match(self, now: Snapshot, query: str) -> Column:
        mask, texts = match_episodes(now.table, parse_query(query))
        rows = np.flatnonzero(mask)
        return self._filter_by_texts(now.table, rows, texts) if texts else rows

    def _filter_by_texts(self, table: pa.Table, candidates: Column, texts: Sequence[QueryTerm]) -> Column:
        """Return the rows whose conversation has the texts; each file is read once."""
        steps, rows = as_floats(table["step"])[candidates].astype(int), as_floats(table["row"])[candidates].astype(int)
        splits = table["split"].take(pa.array(candidates)).to_pylist()
        by_file: dict[tuple[str, int], list[int]] = {}
        for i, where in enumerate(zip(splits, steps.tolist(), strict=True)):
            by_file.setdefault(where, []).append(i)
        kept: list[int] = []
        with ThreadPoolExecutor(4) as pool:
            masks = list(pool.map(partial(self._match_texts, texts=texts), by_file))
        for has, positions in zip(masks, by_file.values(), strict=True):
            kept += [i for i in positions if rows[i] < len(has) and has[rows[i]]]
        return np.asarray(candidates[np.sort(np.array(kept, dtype=int))])

    def _match_texts(self, where: tuple[str, int], texts: Sequence[QueryTerm]) -> Column:
        """Return a mask over a file's rows; empty if the file was removed meanwhile."""
        has = np.zeros(0, dtype=bool)
        with suppress(UserError):
            for sound in read_batches(self.store.episode_file(*where), ["messages"]):
                own = _match_conversations(pc.fill_null(sound.table["messages"], ""), texts)
                count = int(max(sound.numbers, default=-1)) + 1
                has = np.append(has, np.zeros(max(count - len(has), 0), dtype=bool))
                has[sound.numbers] = own
        return has


def _match_conversations(conversations: pa.Array, texts: Sequence[QueryTerm]) -> Column:
    has = np.ones(len(conversations), dtype=bool)
    for term in texts:
        needle = json.dumps(term.value, ensure_ascii=False)[1:-1]  # as it stands in JSON
        hit = pc.match_substring(conversations, needle, ignore_case=True).to_numpy(zero_copy_only=False)
        has &= hit.astype(bool) != term.negated
    return has


def _sort_rows(table: pa.Table, rows: Column, sort: str) -> Column:
    if not sort:
        return np.asarray(rows[np.argsort(-as_floats(table["step"])[rows], kind="stable")])
    name, down = sort.lstrip("-"), sort.startswith("-")
    if name not in NUMBERS:
        raise UserError(f"episodes cannot be ordered by {name!r}{suggest(name, NUMBERS)}")
    values = as_floats(table[NUMBERS[name]])[rows]
    values = np.where(np.isnan(values), np.inf, -values if down else values)  # without a value: last
    return np.asarray(rows[np.argsort(values, kind="stable")])


_COLUMNS = (
    *("step", "split", "row", "task", "sample", "reward", "advantage", "stop", "fault", "n_calls", "n_errors"),
    *("seconds", "turns", *TEXTS),
)


def list_episodes(table: pa.Table, rows: Column) -> list[dict[str, Any]]:
    """List some rows of the index as the page shows them."""
    selected = table.select(_COLUMNS).take(pa.array(rows))
    return [{"id": f"{r['split']}-{r['step']}:{r['row']}", **r} for r in selected.to_pylist()]


def list_groups(table: pa.Table, rows: Column, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of groups of the rows, and a page of them in the rows' order, each with all its members."""
    starts = np.flatnonzero(as_array(table["opens"]).to_numpy(zero_copy_only=False))
    ends = np.append(starts[1:], table.num_rows)
    own = np.searchsorted(starts, rows, side="right") - 1
    _, first = np.unique(own, return_index=True)
    shown = own[np.sort(first)]
    members_of = [list_episodes(table, np.arange(starts[g], ends[g])) for g in shown[offset : offset + limit]]
    return len(shown), [
        {k: members[0][k] for k in ("step", "split", "task")} | {"members": members} for members in members_of
    ]
