"""Faults, tools and waits of a run: what went wrong, how often, how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.view.arrays import Column
from agentrl.view.costs import tools
from agentrl.view.curves import Curves
from agentrl.view.index import numbers, one
from agentrl.view.query import faulted
from agentrl.view.refusals import Refusals
from agentrl.view.search import page

SLOWEST = 20  # episodes, or steps
FEWEST = 5  # steps, before one is called slow


def trouble(curves: Curves, table: Any, refused: Mapping[str, Refusals]) -> dict[str, Any]:
    return {
        "faults": faults(table),
        "tools": tool_rows(table, refused),
        "stops": stops(table),
        "waits": waits(table),
        "slow_steps": slow_steps(curves),
    }


def slow_steps(curves: Curves) -> list[dict[str, Any]]:
    """Steps that took twice as long as the middle one, and where the time went."""
    times = [line for line in curves.lines if line.get("step_time")]
    if len(times) < FEWEST:
        return []
    usual = float(np.median([line["step_time"] for line in times]))
    slow = sorted((line for line in times if line["step_time"] > 2 * usual), key=lambda line: -line["step_time"])
    parts = ("generate", "tools", "env", "learn", "sync", "idle")
    return [
        {"step": line["step"], "seconds": line["step_time"], "usual": usual}
        | {part: line.get(f"time/{part}") for part in parts}
        for line in slow[:SLOWEST]
    ]


def stops(table: Any) -> list[dict[str, Any]]:
    """Why train episodes ended, and what they earned then."""
    rewards = numbers(table["reward"])
    found = []
    for c in sorted(pc.value_counts(table["stop"]).to_pylist(), key=lambda c: -c["counts"]):
        mask = one(pc.equal(table["stop"], c["values"])).to_numpy(zero_copy_only=False).astype(bool)
        own = rewards[mask & ~np.isnan(rewards)]
        found.append({"stop": c["values"], "episodes": c["counts"], "reward": float(own.mean()) if len(own) else None})
    return found


def faults(table: Any) -> list[dict[str, Any]]:
    """By kind: how many, in which steps, and what the last one said."""
    lost = table.filter(pa.array(faulted(table)))
    found = []
    for c in sorted(pc.value_counts(lost["fault"]).to_pylist(), key=lambda c: -c["counts"]):
        own = lost.filter(pc.equal(lost["fault"], c["values"]))
        steps, message = numbers(own["step"]), own["fault_message"][own.num_rows - 1].as_py()
        first, last = int(steps.min()), int(steps.max())
        found.append(
            {"kind": c["values"], "episodes": c["counts"], "first": first, "last": last, "message": message or ""}
        )
    return found


def tool_rows(table: Any, refused: Mapping[str, Refusals]) -> list[dict[str, Any]]:
    """Each tool's calls, and how long they took, in seconds; names that were only ever refused are one row."""
    flat = one(table["calls"]).flatten()
    names, statuses = pc.struct_field(flat, "name"), pc.struct_field(flat, "status")
    seconds, bad, good = (
        numbers(pc.struct_field(flat, "seconds")),
        _mask(pc.equal(statuses, "refused")),
        _mask(pc.equal(statuses, "ok")),
    )
    found, invented, of_invented = [], [], np.zeros(len(flat), dtype=bool)
    for name in tools(table, 200):
        own = _mask(pc.equal(names, name))
        if name and bad[own].all():
            invented.append(name)
            of_invented |= own
        else:
            found.append({"tool": name, **_of_calls(own, bad, good, seconds), **_says(refused.get(name))})
    if invented:
        said = next((refused[name] for name in invented if name in refused), None)
        found.append(
            {"tool": None, "names": invented[:20], **_of_calls(of_invented, bad, good, seconds), **_says(said)}
        )
    return found


def _of_calls(own: Column, bad: Column, good: Column, seconds: Column) -> dict[str, Any]:
    took = seconds[own]
    return {
        "calls": int(own.sum()),
        "refused": int((own & bad).sum()),
        "faults": int((own & ~bad & ~good).sum()),
        "p50": float(np.median(took)),
        "p95": float(np.quantile(took, 0.95)),
        "most": float(took.max()),
    }


def _says(said: Refusals | None) -> dict[str, Any]:
    return {"says": said.example if said else "", "says_share": said.alike / said.total if said else None}


def _mask(column: Any) -> Column:
    return np.asarray(pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(bool))


def waits(table: Any) -> list[dict[str, Any]]:
    """The episodes with the slowest calls: where a rollout stalls."""
    slowest = numbers(table["slowest"])
    known = np.flatnonzero(~np.isnan(slowest))
    rows = known[np.argsort(-slowest[known], kind="stable")][:SLOWEST]
    found = page(table, rows)
    for shown, row in zip(found, rows, strict=True):
        calls = table["calls"][int(row)].as_py()
        worst = max(calls, key=lambda c: c["seconds"])
        shown |= {"tool": worst["name"], "status": worst["status"], "waited": worst["seconds"]}
    return found
