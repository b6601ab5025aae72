"""Which conversations to show somebody who has time for a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from agentrl.view.arrays import Column
from agentrl.view.findings import Finding
from agentrl.view.index import numbers, one
from agentrl.view.query import faulted, matching, parse

EACH = 2


class Chosen(NamedTuple):
    """``rows`` of the index, and why."""

    title: str
    rows: list[int]


def chosen(table: Any, first: int, found: list[Finding]) -> list[Chosen]:
    """The most telling of the train episodes from step ``first`` on; none twice."""
    there = (numbers(table["step"]) >= first) & _is(table, "split", "train")
    taken: set[int] = set()
    kept = []
    for title, rows in [
        *_contrasts(table, there),
        *_of_findings(table, found),
        ("The best", _extreme(table, there, best=True)),
        ("The worst", _extreme(table, there, best=False)),
        ("Lost to a fault of the world", _last(there & faulted(table))),
    ]:
        new = [r for r in rows if r not in taken]
        taken |= set(new)
        if new:
            kept.append(Chosen(title, new))
    return kept


def _is(table: Any, name: str, value: str) -> Column:
    return np.asarray(one(table[name]).to_numpy(zero_copy_only=False) == value)


def _contrasts(table: Any, there: Column) -> Iterator[tuple[str, list[int]]]:
    """The best and the worst of a group that differs most: one task, done and not done."""
    starts = np.flatnonzero(one(table["opens"]).to_numpy(zero_copy_only=False))
    if not len(starts):
        return
    rewards = numbers(table["reward"])
    high = np.maximum.reduceat(np.where(np.isnan(rewards), -np.inf, rewards), starts)
    low = np.minimum.reduceat(np.where(np.isnan(rewards), np.inf, rewards), starts)
    spread = np.where(there[starts] & np.isfinite(high) & np.isfinite(low), high - low, 0.0)
    ends = np.append(starts[1:], table.num_rows)
    for g in np.lexsort((-starts, -spread))[:EACH]:  # of equals the newest
        if spread[g] > 0:
            own = rewards[starts[g] : ends[g]]
            pair = [int(starts[g] + np.nanargmax(own)), int(starts[g] + np.nanargmin(own))]
            yield f"One task, done and not done: task {table['task'][pair[0]].as_py()}", pair


def _of_findings(table: Any, found: list[Finding]) -> Iterator[tuple[str, list[int]]]:
    """An example of each kind of episode that costs reward."""
    for finding in found:
        if finding.kind == "bad" and finding.query:
            mask, _ = matching(table, parse(finding.query))
            yield f"An example: {finding.text}", _last(mask)[:1]


def _extreme(table: Any, there: Column, best: bool) -> list[int]:
    rewards = numbers(table["reward"])
    rows = np.flatnonzero(there & ~np.isnan(rewards))
    busy = numbers(table["n_calls"])[rows]  # among equals the one that did most
    order = np.lexsort((-rows, -busy, -rewards[rows] if best else rewards[rows]))
    return [int(r) for r in rows[order[:EACH]]]


def _last(mask: Column) -> list[int]:
    return [int(r) for r in np.flatnonzero(mask)[::-1][:EACH]]
