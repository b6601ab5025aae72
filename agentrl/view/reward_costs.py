"""What episodes have in common that earn less, and how much of the reward that costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from agentrl.view.arrays import Column
from agentrl.view.index import numbers, one
from agentrl.view.query import with_call
from agentrl.view.text import cut, visible

FEWEST = 20  # episodes behind a sentence


class Cost(NamedTuple):
    """What a kind of episodes costs: the reward would be so much higher if they earned what the others do."""

    cost: float
    share: float
    inside: float
    outside: float
    words: str
    query: str


def telling(c: Cost) -> float:
    """Of two that cost about the same: what a tool says tells more than that turns ran out, and that more than what was
    not done, which is often a consequence."""
    return c.cost * (1.1 if "refused_by=" in c.query else 0.8 if "!=" in c.query else 1.0)


def costs(lately: Any, rewards: Column) -> Iterator[Cost]:
    scored = np.isfinite(rewards)
    for words, query, mask in _kinds(lately):
        inside, outside = mask & scored, ~mask & scored
        if inside.sum() >= FEWEST // 2 and outside.sum() >= FEWEST // 2:
            low, high = float(rewards[inside].mean()), float(rewards[outside].mean())
            share = float(inside.sum() / scored.sum())
            yield Cost(share * (high - low), share, low, high, words, query)


def _kinds(lately: Any) -> Iterator[tuple[str, str, Column]]:
    """What an episode may have in common with others: words, the query that finds them, a mask."""
    for stop in pc.unique(lately["stop"]).to_pylist():
        if stop not in (None, "fault"):
            mask = one(pc.equal(lately["stop"], stop)).to_numpy(zero_copy_only=False)
            yield f"stopped at {stop}", f"stop={stop}", mask
    flat = one(lately["calls"]).flatten()
    for name in tools(lately):
        quoted = name if name.isidentifier() else f'"{name}"'
        shown = f"tool {visible(cut(name, 60))}" if name else "the reader of calls (not valid JSON)"
        yield f"{shown} refused a call", f"refused_by={quoted}", with_call(lately, "name", name, refused=True)
        if name and _is_used(lately, name):
            yield f"{shown} was never called", f"tool!={quoted}", ~with_call(lately, "name", name)
    if len(flat):
        yield "no tool was called", "calls=0", numbers(lately["n_calls"]) == 0


def _is_used(lately: Any, name: str) -> bool:
    """A tool there is, and not a name that the model made up once."""
    return bool(with_call(lately, "name", name).mean() >= 0.1)


def tools(table: Any, most: int = 12) -> list[str]:
    """The tools that are called most; ``""`` stands for calls that could not be read."""
    names = pc.struct_field(one(table["calls"]).flatten(), "name")
    counts = sorted(pc.value_counts(names).to_pylist(), key=lambda c: -c["counts"])
    return [c["values"] for c in counts[:most] if c["values"] is not None]
