"""Highlights: the few conversations of a run that show the most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from agentrl.environments.task_sampler import describe_task
from agentrl.view.findings import RunFinding
from agentrl.view.index import Column, as_array, as_floats
from agentrl.view.query import is_faulted, match_episodes, parse_query

EACH = 2


class _Highlight(NamedTuple):
    """``rows`` of the index, under a title that says why."""

    title: str
    rows: list[int]


def select_highlights(
    table: pa.Table, first: int, findings: Sequence[RunFinding], split: str = "train"
) -> list[_Highlight]:
    """Select the most telling of a split's episodes from step ``first`` on; none twice."""
    recent = (as_floats(table["step"]) >= first) & _equals(table, "split", split)
    shown: set[int] = set()
    highlights = []
    for title, rows in [
        *_find_contrasts(table, recent),
        *_find_examples(table, findings),
        ("The best", _find_extremes(table, recent, best=True)),
        ("The worst", _find_extremes(table, recent, best=False)),
        ("Lost to an infrastructure error", _last(recent & is_faulted(table))),
    ]:
        new = [r for r in rows if r not in shown]
        shown |= set(new)
        if new:
            highlights.append(_Highlight(title, new))
    return highlights


def _equals(table: pa.Table, name: str, value: str) -> Column:
    return np.asarray(as_array(table[name]).to_numpy(zero_copy_only=False) == value)


def _find_contrasts(table: pa.Table, recent: Column) -> Iterator[tuple[str, list[int]]]:
    """Yield the best and the worst of the groups that differ most: one task, done and not done."""
    starts = np.flatnonzero(as_array(table["opens"]).to_numpy(zero_copy_only=False))
    if not len(starts):
        return
    rewards = as_floats(table["reward"])
    high = np.maximum.reduceat(np.where(np.isnan(rewards), -np.inf, rewards), starts)
    low = np.minimum.reduceat(np.where(np.isnan(rewards), np.inf, rewards), starts)
    spread = np.where(recent[starts] & np.isfinite(high) & np.isfinite(low), high - low, 0.0)
    ends = np.append(starts[1:], table.num_rows)
    for g in np.lexsort((-starts, -spread))[:EACH]:  # of equals the newest
        if spread[g] > 0:
            own = rewards[starts[g] : ends[g]]
            pair = [int(starts[g] + np.nanargmax(own)), int(starts[g] + np.nanargmin(own))]
            task, split = (table[name][pair[0]].as_py() for name in ("task", "split"))
            yield f"One task, done and not done: {describe_task(task, split)}", pair


def _find_examples(table: pa.Table, findings: Sequence[RunFinding]) -> Iterator[tuple[str, list[int]]]:
    """Yield an example of each kind of episode that costs reward."""
    for finding in findings:
        if finding.kind == "bad" and finding.query:
            mask, _ = match_episodes(table, parse_query(finding.query))
            yield f"An example: {finding.text}", _last(mask)[:1]


def _find_extremes(table: pa.Table, recent: Column, best: bool) -> list[int]:
    rewards = as_floats(table["reward"])
    rows = np.flatnonzero(recent & ~np.isnan(rewards))
    busy = as_floats(table["n_calls"])[rows]  # among equals the one that did most
    order = np.lexsort((-rows, -busy, -rewards[rows] if best else rewards[rows]))
    return [int(r) for r in rows[order[:EACH]]]


def _last(mask: Column) -> list[int]:
    return [int(r) for r in np.flatnonzero(mask)[::-1][:EACH]]
