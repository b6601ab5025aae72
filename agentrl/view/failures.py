"""Failures of a run: faults, failed calls, stops and slow calls, with their counts and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.types import TOOL_ERRORS
from agentrl.view.escaping import shorten_fault
from agentrl.view.index import Column, as_array, as_floats
from agentrl.view.metrics_file import MetricsFile
from agentrl.view.query import is_faulted
from agentrl.view.reward_costs import list_called_tools
from agentrl.view.search import list_episodes
from agentrl.view.tool_errors import ToolErrorCount

SLOWEST = 20  # episodes, or steps
FEWEST_STEPS = 5  # before one is called slow


def describe_failures(
    metrics: MetricsFile, table: pa.Table, tool_errors: Mapping[str, ToolErrorCount]
) -> dict[str, Any]:
    """Return the tables of the page: faults, tools, stops, slow calls and slow steps."""
    return {
        "faults": _faults(table),
        "tools": _tool_rows(table, tool_errors),
        "stops": _stops(table),
        "waits": _waits(table),
        "slow_steps": _slow_steps(metrics),
    }


def _slow_steps(metrics: MetricsFile) -> list[dict[str, Any]]:
    """List the steps that took over twice the median, and where the time went."""
    times = [line for line in metrics.lines if line.get("step_time")]
    if len(times) < FEWEST_STEPS:
        return []
    usual = float(np.median([line["step_time"] for line in times]))
    slow = sorted((line for line in times if line["step_time"] > 2 * usual), key=lambda line: -line["step_time"])
    parts = ("generate", "tools", "env", "learn", "sync", "idle")
    return [
        {"step": line["step"], "seconds": line["step_time"], "usual": usual}
        | {part: line.get(f"time/{part}") for part in parts}
        for line in slow[:SLOWEST]
    ]


def _stops(table: pa.Table) -> list[dict[str, Any]]:
    """Count the train episodes by the reason they ended, with their mean reward."""
    rewards = as_floats(table["reward"])
    rows = []
    for c in sorted(pc.value_counts(table["stop"]).to_pylist(), key=lambda c: -c["counts"]):
        mask = as_array(pc.equal(table["stop"], c["values"])).to_numpy(zero_copy_only=False).astype(bool)
        own = rewards[mask & ~np.isnan(rewards)]
        rows.append({"stop": c["values"], "episodes": c["counts"], "reward": float(own.mean()) if len(own) else None})
    return rows


def _faults(table: pa.Table) -> list[dict[str, Any]]:
    """Count the faults by kind, with their steps and the last one's message."""
    lost = table.filter(pa.array(is_faulted(table)))
    rows = []
    for c in sorted(pc.value_counts(lost["fault"]).to_pylist(), key=lambda c: -c["counts"]):
        own = lost.filter(pc.equal(lost["fault"], c["values"]))
        steps, message = as_floats(own["step"]), own["fault_message"][own.num_rows - 1].as_py()
        first, last = int(steps.min()), int(steps.max())
        rows.append(
            {
                "kind": c["values"],
                "episodes": c["counts"],
                "first": first,
                "last": last,
                "message": shorten_fault(message or ""),
            }
        )
    return rows


def _tool_rows(table: pa.Table, tool_errors: Mapping[str, ToolErrorCount]) -> list[dict[str, Any]]:
    """Count each tool's calls, with their seconds; names whose every call failed share one row."""
    flat = _each_once(table)
    names, statuses = pc.struct_field(flat, "name"), pc.struct_field(flat, "status")
    seconds, bad, good = (
        as_floats(pc.struct_field(flat, "seconds")),
        _mask(pc.is_in(statuses, pa.array(TOOL_ERRORS))),
        _mask(pc.equal(statuses, "ok")),
    )
    rows, invented, to_invented = [], [], np.zeros(len(flat), dtype=bool)
    for name in list_called_tools(table, 200):
        own = _mask(pc.equal(names, name))
        if not own.any():
            continue
        if name and bad[own].all():
            invented.append(name)
            to_invented |= own
        else:
            rows.append({"tool": name, **_summarize_calls(own, bad, good, seconds), **_quote(tool_errors.get(name))})
    if invented:
        errors = next((tool_errors[name] for name in invented if name in tool_errors), None)
        rows.append(
            {
                "tool": None,
                "names": invented[:20],
                **_summarize_calls(to_invented, bad, good, seconds),
                **_quote(errors),
            }
        )
    return rows


def _each_once(table: pa.Table) -> pa.Array:
    """List all calls; those that branches share are there once."""
    calls = as_array(table["calls"])
    shared = np.nan_to_num(as_floats(table["shared_turns"]))
    turns, parents = as_floats(pc.struct_field(calls.flatten(), "turn")), pc.list_parent_indices(calls).to_numpy()
    return calls.flatten().filter(pa.array(turns >= shared[parents]))


def _summarize_calls(own: Column, bad: Column, good: Column, seconds: Column) -> dict[str, Any]:
    took = seconds[own]
    return {
        "calls": int(own.sum()),
        "errors": int((own & bad).sum()),
        "faults": int((own & ~bad & ~good).sum()),
        "p50": float(np.median(took)),
        "p95": float(np.quantile(took, 0.95)),
        "most": float(took.max()),
    }


def _quote(errors: ToolErrorCount | None) -> dict[str, Any]:
    """Return the most frequent error, and its share of all."""
    if errors is None:
        return {"says": "", "says_share": None}
    return {"says": errors.example, "says_share": errors.alike / errors.total}


def _mask(column: pa.Array) -> Column:
    return np.asarray(pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(bool))


def _waits(table: pa.Table) -> list[dict[str, Any]]:
    """List the episodes with the slowest calls, where a rollout stalls."""
    slowest = as_floats(table["slowest"])
    known = np.flatnonzero(~np.isnan(slowest))
    rows = known[np.argsort(-slowest[known], kind="stable")][:SLOWEST]
    episodes = list_episodes(table, rows)
    for episode, row in zip(episodes, rows, strict=True):
        calls = table["calls"][int(row)].as_py()
        worst = max(calls, key=lambda c: c["seconds"])
        episode |= {"tool": worst["name"], "status": worst["status"], "waited": worst["seconds"]}
    return episodes
