"""Kinds of episodes that earn less than the others, and how much of the reward that costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.view.escaping import escape_controls, truncate
from agentrl.view.index import Column, as_array, as_floats
from agentrl.view.query import has_call

FEWEST_EPISODES = 20  # behind a sentence


class _RewardCost(NamedTuple):
    """The cost of a kind of episodes: how much higher the reward were if they earned as much as the others."""

    cost: float
    share: float
    inside: float
    outside: float
    words: str
    query: str


def cost_priority(c: _RewardCost) -> float:
    """Return a key to sort by: of two with about the same cost, a failed call explains more than a stop, and that more
    than a call that was not made, which is often a consequence."""
    return c.cost * (1.1 if "failed_tool=" in c.query else 0.8 if "!=" in c.query else 1.0)


def estimate_costs(lately: pa.Table, rewards: Column) -> Iterator[_RewardCost]:
    """Yield the cost of each kind of episodes that is frequent enough, and not all of them."""
    scored = np.isfinite(rewards)
    for words, query, mask in _kinds(lately):
        inside, outside = mask & scored, ~mask & scored
        if inside.sum() >= FEWEST_EPISODES // 2 and outside.sum() >= FEWEST_EPISODES // 2:
            low, high = float(rewards[inside].mean()), float(rewards[outside].mean())
            share = float(inside.sum() / scored.sum())
            yield _RewardCost(share * (high - low), share, low, high, words, query)


def _kinds(lately: pa.Table) -> Iterator[tuple[str, str, Column]]:
    """Yield each kind of episodes: its description, the query that finds them, a mask."""
    for stop in pc.unique(lately["stop"]).to_pylist():
        if stop not in (None, "fault"):
            mask = as_array(pc.equal(lately["stop"], stop)).to_numpy(zero_copy_only=False)
            yield f"stopped at {stop}", f"stop={stop}", mask
    flat = as_array(lately["calls"]).flatten()
    for name in list_called_tools(lately):
        quoted = name if name.isidentifier() else f'"{name}"'
        shown = f"tool {escape_controls(truncate(name, 60))}" if name else "the reader of calls (not valid JSON)"
        yield f"a call of {shown} failed", f"failed_tool={quoted}", has_call(lately, "name", name, failed=True)
        if name and _is_used(lately, name):
            yield f"{shown} was never called", f"tool!={quoted}", ~has_call(lately, "name", name)
    if len(flat):
        yield "no tool was called", "calls=0", as_floats(lately["n_calls"]) == 0


def _is_used(lately: pa.Table, name: str) -> bool:
    """Return True for a tool that exists, and False for a name that the model made up once."""
    return bool(has_call(lately, "name", name).mean() >= 0.1)


def list_called_tools(table: pa.Table, most: int = 12) -> list[str]:
    """List the tools that are called most; ``""`` stands for calls that could not be read."""
    names = pc.struct_field(as_array(table["calls"]).flatten(), "name")
    counts = sorted(pc.value_counts(names).to_pylist(), key=lambda c: -c["counts"])
    return [c["values"] for c in counts[:most] if c["values"] is not None]
