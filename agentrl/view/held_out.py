"""The same held-out tasks at two steps of a run: those that were fixed, those that broke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.evaluation.statistics import estimate_difference, is_pass, is_right
from agentrl.view.search import list_episodes

MOST = 2_000  # tasks that are listed
VERDICTS = ("broke", "fixed", "still wrong", "still right")
Row = Mapping[str, Any]


def pair_held_out(table: pa.Table, pass_at: float = 1.0, split: str = "test") -> dict[str, Any] | None:
    """Pair the tasks that were evaluated first and last; None without two evaluations.

    Args:
        pass_at: the reward from which on an episode passes.

    Returns:
        ``before`` and ``after`` are the steps, ``difference`` is the paired one of the sampled rewards with its 95 %
        interval, ``counts`` are by verdict, ``tasks`` are the pairs, those that changed first.
    """
    whole = table.filter(pc.equal(table["split"], split))
    steps = sorted(pc.unique(whole["step"]).to_pylist())
    if len(steps) < 2:
        return None
    before, after = (_tasks(whole, step) for step in (steps[0], steps[-1]))
    pairs = [_pair(before[t], after[t], pass_at) for t in before if t in after]
    order = {verdict: at for at, verdict in enumerate(VERDICTS)}
    pairs.sort(key=lambda p: (order.get(p["verdict"], len(order)), p["task"]))
    scored = [t for t in before if t in after and before[t]["rewards"] and after[t]["rewards"]]
    result = {
        "before": steps[0],
        "after": steps[-1],
        "counts": {v: sum(p["verdict"] == v for p in pairs) for v in VERDICTS},
        "tasks": pairs[:MOST],
        "difference": None,
    }
    if len(scored) >= 2:
        result["difference"] = _difference(
            [before[t]["rewards"] for t in scored], [after[t]["rewards"] for t in scored]
        )
    return result


def _difference(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> dict[str, float]:
    estimate = estimate_difference(before, after)
    return {"mean": float(estimate.mean), "low": float(estimate.low), "high": float(estimate.high)}


def _tasks(whole: pa.Table, step: int) -> dict[int, dict[str, Any]]:
    """Gather by task: the sampled episodes, their rewards where they were scored, and the greedy one's.

    The last member of a task is the greedy one; how many come before it may be another number at each evaluation.
    """
    rows = list_episodes(whole, np.flatnonzero(pc.equal(whole["step"], step).to_numpy(zero_copy_only=False)))
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["task"], []).append(row)
    trials = max([1, *(row["sample"] for row in rows)])
    return {task: _task(members, trials) for task, members in groups.items()}


def _task(members: Sequence[Row], trials: int) -> dict[str, Any]:
    sampled = [m for m in members if m["sample"] < trials]
    greedy = next((m for m in members if m["sample"] == trials), None)
    rewards = [m["reward"] for m in sampled if m["reward"] is not None]
    return {"rewards": rewards, "rows": sampled or members, "greedy": greedy and greedy["reward"]}


def _pair(before: Mapping[str, Any], after: Mapping[str, Any], pass_at: float) -> dict[str, Any]:
    pair = {name: before["rows"][0][name] for name in ("task", "question", "expected")}
    for name, side in (("before", before), ("after", after)):
        reward = fmean(side["rewards"]) if side["rewards"] else None
        shown = _find_example(side, pass_at)
        pair[name] = {"reward": reward, "greedy": side["greedy"], "id": shown["id"], "answer": shown["answer"]}
    return {**pair, "verdict": _verdict(before["rewards"], after["rewards"], pass_at)}


def _find_example(side: Mapping[str, Any], pass_at: float) -> Row:
    """Return an episode that ended as the verdict says; the first if none was scored."""
    right = is_right(side["rewards"], pass_at)
    scored = (r for r in side["rows"] if r["reward"] is not None and is_pass(r["reward"], pass_at) is right)
    return next(scored, side["rows"][0])


def _verdict(before: Sequence[float], after: Sequence[float], pass_at: float) -> str:
    if not before or not after:
        return "not scored"
    was, now = is_right(before, pass_at), is_right(after, pass_at)
    if was == now:
        return "still right" if now else "still wrong"
    return "fixed" if now else "broke"
