"""A run's store, and the results of the page's requests, cached until new data arrives."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow.compute as pc

from agentrl.runs.reader import EpisodeId, Row
from agentrl.view import episode
from agentrl.view.evaluation_findings import describe_scope, find_in_evaluation, find_scope
from agentrl.view.failures import describe_failures
from agentrl.view.findings import RunFinding, find_in_training, find_recent_start
from agentrl.view.held_out import pair_held_out
from agentrl.view.panels import Panel, compute_panel, to_json
from agentrl.view.processes import Processes
from agentrl.view.search import EpisodeSearch
from agentrl.view.store import Store
from agentrl.view.timelines import Timelines
from agentrl.view.tokens import TokenTexts
from agentrl.view.tool_errors import ToolErrorCount, count_tool_errors, read_failed_conversations
from agentrl.view.trend import find_trend

T = TypeVar("T")
_CACHED = 4  # rows; one may be large
_FILES = 6  # the newest, whose failed calls are read


class RunCache:
    """One run: its store, searches, tokens and timelines, and cached results. Safe to use from several threads."""

    def __init__(self, store: Store, panels: Mapping[str, Panel] | None = None) -> None:
        self.plugin_panels = panels or {}
        self.store, self.search, self.texts = store, EpisodeSearch(store), TokenTexts(store)
        self.timelines = Timelines(store.folder / "timeline.jsonl")
        self.run_processes = Processes(store.folder)
        self._rows: OrderedDict[tuple[int, EpisodeId], Row] = OrderedDict()
        self._results: dict[str, tuple[int, Any]] = {}
        self._lock, self._computing = threading.Lock(), threading.RLock()

    def summary(self) -> dict[str, Any]:
        """Return the state of the run, which the page asks for every two seconds."""
        store, now = self.store, self.store.now
        steps, _ = store.metrics.series("policy_version")
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
            "lines": len(store.metrics.lines),
            "problems": [f"{name}: {why}" for name, why in sorted(store.problems.items())[:5]],
        }

    def row(self, where: EpisodeId) -> Row:
        """Read an episode; the last few are cached, as the page asks for a long one in pieces."""
        key = (self.store.now.version, where)
        with self._lock:
            if key not in self._rows:
                self._rows[key] = episode.read_episode(self.store, where)
                while len(self._rows) > _CACHED:
                    self._rows.popitem(last=False)
            return self._rows[key]

    def findings(self) -> list[RunFinding]:
        """List what stands out in the run."""
        return self._once("findings", self._find)

    def _find(self) -> list[RunFinding]:
        damage = [RunFinding("bad", sentence) for sentence in self.store.damage()]
        if scope := find_scope(self.store.folder):
            return damage + find_in_evaluation(self.store, scope, self._tool_errors())
        return damage + find_in_training(
            self.store.metrics, self.store.now.table, self._tool_errors(), self.store.messages.all
        )

    def first_step(self) -> int:
        """Return the first recent step, from which on the findings are; of an evaluation 0."""
        if find_scope(self.store.folder):
            return 0
        steps, rewards = self.store.metrics.series("reward")
        return find_recent_start(steps, find_trend(steps, rewards))

    def failures(self) -> dict[str, Any]:
        """Return the tables of faults, tools, stops and slow calls."""
        return self._once(
            "failures", lambda: describe_failures(self.store.metrics, self.store.now.table, self._tool_errors())
        )

    def held_out(self) -> dict[str, Any] | None:
        """Pair a training's held-out tasks; None for an evaluation, which has no before and after."""
        if find_scope(self.store.folder):
            return None
        pass_at = self.store.setting("eval.pass_at", 1.0)
        return self._once("held out", lambda: pair_held_out(self.store.now.table, pass_at))

    def processes(self, step: int | None, steps: int) -> dict[str, Any]:
        """Return who waits on whom, in so many steps up to one, the last by default, and now."""
        store = self.store
        described = self.run_processes.describe(
            store.metrics,
            store.messages.all,
            ended=store.ended,
            step=step,
            steps=steps,
            demonstrates=bool(store.setting("sft.data")),
        )
        return {**described, "evaluates": bool(find_scope(store.folder))}

    def panels(self) -> list[dict[str, Any]]:
        """Return what plugins' panels show of the run."""
        return self._once("panels", self._compute_panels)

    def _compute_panels(self) -> list[dict[str, Any]]:
        shown = (compute_panel(name, panel, self.store) for name, panel in self.plugin_panels.items())
        return [to_json(panel) for panel in shown if panel is not None]

    def _tool_errors(self) -> Mapping[str, ToolErrorCount]:
        return self._once("tool_errors", self._read_tool_errors)

    def _read_tool_errors(self) -> Mapping[str, ToolErrorCount]:
        scope = find_scope(self.store.folder)
        split = scope.split if scope else "train"
        table = self.store.now.table
        mask = pc.and_(pc.equal(table["split"], split), pc.greater_equal(table["step"], self.first_step()))
        steps = sorted(pc.unique(table["step"].filter(mask)).to_pylist(), reverse=True)
        return count_tool_errors(read_failed_conversations(self.store, steps[:_FILES], split))

    def _once(self, name: str, compute: Callable[[], T]) -> T:
        with self._computing:  # two that ask at once wait for one
            version, result = self._results.get(name, (-1, None))
            if version != self.store.now.version:
                version = self.store.now.version
                result = compute()
                self._results[name] = (version, result)
            typed: T = result
            return typed
