"""Findings in an evaluation: its scope, its means, and the kinds of episodes that cost reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.errors import UserError
from agentrl.evaluation.scope import EvaluationScope, read_scope
from agentrl.settings.documents import read_json
from agentrl.view.findings import RunFinding, find_costs, find_faults, find_unsolved_tasks
from agentrl.view.index import as_floats
from agentrl.view.store import Store
from agentrl.view.tool_errors import ToolErrorCount


def find_scope(folder: Path) -> EvaluationScope | None:
    """Return the scope of an evaluation's folder; None for a training's, or if it cannot be read."""
    try:
        return read_scope(folder)
    except UserError:
        return None


def describe_scope(folder: Path) -> str:
    """Describe the tasks of an evaluation's folder; empty for a training's, or if it cannot be read."""
    scope = find_scope(folder)
    if scope is None:
        return ""
    trials = f", {scope.sampled} trials each" if scope.sampled > 1 else ""
    return f"evaluation of {scope.tasks:,} tasks{trials}"


def describe_step(folder: Path, step: int) -> str:
    """Describe the file of a row: a step of a training, a chunk of an evaluation."""
    return f"{'step' if find_scope(folder) is None else 'chunk'} {step}"


def find_in_evaluation(
    store: Store, scope: EvaluationScope, tool_errors: Mapping[str, ToolErrorCount]
) -> list[RunFinding]:
    """List an evaluation's means with their 95 % intervals, then its faults and costs, the most important first."""
    own = store.now.table.filter(pc.equal(store.now.table["split"], scope.split)).combine_chunks()
    where = f"split={scope.split}"
    summary = _read_summary(store.folder)
    return [
        *([f for how in ("sampled", "greedy") for f in _find_means(how, summary.get(how))] if summary else ()),
        *(() if summary else _find_progress(store, scope, own)),
        *find_faults(own, where, "are in no mean"),
        *find_costs(own, tool_errors, where),
        *find_unsolved_tasks(own, where),
    ]


def _read_summary(folder: Path) -> dict[str, Any]:
    try:
        summary = read_json(folder / "summary.json")
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _find_progress(store: Store, scope: EvaluationScope, own: pa.Table) -> Iterator[RunFinding]:
    """Yield the progress of an evaluation without a result, and the way to finish it."""
    tasks = len(pc.unique(own["task"]))
    so_far = f"{tasks:,} of {scope.tasks:,} tasks are here"
    way_out = f"agentrl eval --resume {store.folder} rolls out what is missing"
    if own.num_rows and not np.isfinite(as_floats(own["reward"])).any():
        yield RunFinding("bad", f"not one of {own.num_rows:,} episodes could be scored; {way_out}, and these again")
    elif store.live:
        yield RunFinding("note", f"{so_far}; the means follow when all are")
    else:
        yield RunFinding("bad", f"it stopped before its end: {so_far}; {way_out}")


def _find_means(how: str, measured: object) -> Iterator[RunFinding]:
    if not isinstance(measured, dict):
        return
    lost = f"; {measured['faults']} more were lost to faults, and are in no mean" if measured["faults"] else ""
    yield RunFinding(
        "note",
        f"reward, {how}: {measured['reward']:.3f} (95 % interval {measured['low']:.3f} to {measured['high']:.3f}) "
        f"over {measured['tasks']:,} tasks, {measured['episodes']:,} episodes{lost}",
    )
    for rate in measured.get("passes", ()):
        if rate["k"] > 1:
            any_passes, all_pass = (_format_rate(rate, name) for name in ("pass_at_k", "pass_hat_k"))
            yield RunFinding("note", f"of {rate['k']} trials one passes: {any_passes}; all pass: {all_pass}")


def _format_rate(rate: Mapping[str, Any], name: str) -> str:
    low, high = rate[f"{name}_interval"]
    sign = {"pass_at_k": "@", "pass_hat_k": "^"}[name]
    return f"pass{sign}{rate['k']} {rate[name]:.3f} ({low:.3f} to {high:.3f})"
