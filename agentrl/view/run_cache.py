"""One run as the page asks about it: its store, and what was computed from it, kept until it goes on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow.compute as pc

from agentrl.stored import Place, Row
from agentrl.view import episode
from agentrl.view.evaluated import describe_scope, found_means
from agentrl.view.findings import Finding, findings, recent_from
from agentrl.view.held_out import pair_held_out
from agentrl.view.refusals import Refusals, conversations, refusals
from agentrl.view.search import Search
from agentrl.view.store import Store
from agentrl.view.timelines import Timelines
from agentrl.view.tokens import Texts
from agentrl.view.trend import trend
from agentrl.view.trouble import trouble

T = TypeVar("T")
KEPT = 4  # rows; one may be large
FILES = 6  # of those looked at, whose refusals are read


class Look:
    def __init__(self, store: Store) -> None:
        self.store, self.search, self.texts = store, Search(store), Texts(store)
        self.timelines = Timelines(store.folder / "timeline.jsonl")
        self._rows: OrderedDict[tuple[int, Place], Row] = OrderedDict()
        self._kept: dict[str, tuple[int, Any]] = {}
        self._lock, self._making = threading.Lock(), threading.RLock()

    def summary(self) -> dict[str, Any]:
        """What is asked for every two seconds."""
        store, now = self.store, self.store.now
        steps, _ = store.curves.series("policy_version")
        return {
            "name": store.name,
            "folder": str(store.folder),
            "version": now.version,
            "progress": now.progress,
            "episodes": now.table.num_rows,
            "step": steps[-1] if steps else 0,
            "steps": store.setting("steps"),
            "env": store.setting("env.name"),
            "model": store.setting("model"),
            "live": store.live,
            "ended": store.ended,
            "evaluates": describe_scope(store.folder),
            "lines": len(store.curves.lines),
            "problems": [f"{name}: {why}" for name, why in sorted(store.problems.items())[:5]],
        }

    def row(self, where: Place) -> Row:
        """An episode; the last few are kept, as a long one is asked for in pieces."""
        key = (self.store.now.version, where)
        with self._lock:
            if key not in self._rows:
                self._rows[key] = episode.read(self.store, where)
                while len(self._rows) > KEPT:
                    self._rows.popitem(last=False)
            return self._rows[key]

    def findings(self) -> list[dict[str, str]]:
        return [f._asdict() for f in self._once("findings", self.found)]

    def found(self) -> list[Finding]:
        if describe_scope(self.store.folder):
            return found_means(self.store.folder)
        return findings(self.store.curves, self.store.now.table, self._refusals(), self.store.told.said)

    def trouble(self) -> dict[str, Any]:
        return self._once("trouble", lambda: trouble(self.store.curves, self.store.now.table, self._refusals()))

    def held_out(self) -> dict[str, Any] | None:
        trials, pass_at = self.store.setting("eval.trials", 1), self.store.setting("eval.pass_at", 1.0)
        return self._once("held out", lambda: pair_held_out(self.store.now.table, trials, pass_at))

    def _refusals(self) -> Mapping[str, Refusals]:
        return self._once("refusals", self._read_refusals)

    def _read_refusals(self) -> Mapping[str, Refusals]:
        steps, rewards = self.store.curves.series("reward")
        first = recent_from(steps, trend(steps, rewards))
        table = self.store.now.table
        mask = pc.and_(pc.equal(table["split"], "train"), pc.greater_equal(table["step"], first))
        there = sorted(pc.unique(table["step"].filter(mask)).to_pylist(), reverse=True)
        return refusals(conversations(self.store, there[:FILES]))

    def _once(self, name: str, make: Callable[[], T]) -> T:
        with self._making:  # two that ask at once wait for one
            version, found = self._kept.get(name, (-1, None))
            if version != self.store.now.version:
                version = self.store.now.version
                found = make()
                self._kept[name] = (version, found)
            made: T = found
            return made
