"""Episodes by query, in order, a page at a time."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.errors import UserError, nearest
from agentrl.view.arrays import Column
from agentrl.view.index import TEXTS, numbers, one
from agentrl.view.query import NUMBERS, Term, matching, parse
from agentrl.view.store import Snapshot, Store

KEPT = 16  # results


class Search:
    """Queries on one run; the last results are kept until the run goes on."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._found: OrderedDict[tuple[Any, ...], Column] = OrderedDict()

    def rows(self, query: str = "", sort: str = "") -> tuple[Snapshot, Column]:
        """Row numbers of the index, in order: the newest step first, or as ``sort`` (``reward``, ``-seconds``) says.

        Raises:
            UserError: a query or an order that cannot be read.
        """
        now = self.store.now
        key = (now.version, query, sort)
        if key not in self._found:
            self._found[key] = _ordered(now.table, self._matching(now, query), sort)
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
        return now, self._found[key]

    def _matching(self, now: Snapshot, query: str) -> Column:
        mask, texts = matching(now.table, parse(query))
        found = np.flatnonzero(mask)
        return self._with_texts(now.table, found, texts) if texts else found

    def _with_texts(self, table: Any, found: Column, texts: Sequence[Term]) -> Column:
        """Of some rows those whose conversation has the texts; each file is read once."""
        steps, rows = numbers(table["step"])[found].astype(int), numbers(table["row"])[found].astype(int)
        splits = table["split"].take(pa.array(found)).to_pylist()
        by_file: dict[tuple[str, int], list[int]] = {}
        for i, where in enumerate(zip(splits, steps.tolist(), strict=True)):
            by_file.setdefault(where, []).append(i)
        kept: list[int] = []
        with ThreadPoolExecutor(4) as pool:
            every = list(pool.map(partial(self._having, texts=texts), by_file))
        for has, places in zip(every, by_file.values(), strict=True):
            kept += [i for i in places if rows[i] < len(has) and has[rows[i]]]
        return np.asarray(found[np.sort(np.array(kept, dtype=int))])

    def _having(self, where: tuple[str, int], texts: Sequence[Term]) -> Column:
        """A mask over a file's rows; empty where it was taken back meanwhile."""
        try:
            table = pq.read_table(self.store.file_of(*where), columns=["messages"], use_threads=False)
        except (OSError, pa.ArrowException):
            return np.zeros(0, dtype=bool)
        said = pc.fill_null(one(table["messages"]), "")
        has = np.ones(len(said), dtype=bool)
        for term in texts:
            needle = json.dumps(term.value, ensure_ascii=False)[1:-1]  # as it stands in JSON
            hit = pc.match_substring(said, needle, ignore_case=True).to_numpy(zero_copy_only=False)
            has &= hit.astype(bool) != term.negated
        return has


def _ordered(table: Any, found: Column, sort: str) -> Column:
    if not sort:
        return np.asarray(found[np.argsort(-numbers(table["step"])[found], kind="stable")])
    name, down = sort.lstrip("-"), sort.startswith("-")
    if name not in NUMBERS:
        raise UserError(f"episodes cannot be ordered by {name!r}{nearest(name, NUMBERS)}")
    values = numbers(table[NUMBERS[name]])[found]
    values = np.where(np.isnan(values), np.inf, -values if down else values)  # without a value: last
    return np.asarray(found[np.argsort(values, kind="stable")])


COLUMNS = ("step", "split", "row", "task", "member", "reward", "advantage", "stop", "fault", "n_calls", "n_refused")
MORE = ("seconds", "turns", *TEXTS)


def page(table: Any, rows: Column) -> list[dict[str, Any]]:
    """Some rows of the index, as the page lists them."""
    taken = table.select([*COLUMNS, *MORE]).take(pa.array(rows))
    return [{"id": f"{r['split']}-{r['step']}:{r['row']}", **r} for r in taken.to_pylist()]


def groups(table: Any, rows: Column, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """How many groups the rows belong to; some of them in the rows' order, each with all its members."""
    starts = np.flatnonzero(one(table["opens"]).to_numpy(zero_copy_only=False))
    ends = np.append(starts[1:], table.num_rows)
    own = np.searchsorted(starts, rows, side="right") - 1
    _, first = np.unique(own, return_index=True)
    shown = own[np.sort(first)]
    found = [page(table, np.arange(starts[g], ends[g])) for g in shown[offset : offset + limit]]
    return len(shown), [
        {k: members[0][k] for k in ("step", "split", "task")} | {"members": members} for members in found
    ]
