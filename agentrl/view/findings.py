"""Findings in a training run, in sentences: pure functions of its metrics and its index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.health.signs import LIMITS, History, find_signs
from agentrl.spread import is_rounding
from agentrl.view.escaping import escape_controls, shorten_fault, truncate
from agentrl.view.index import as_array, as_floats
from agentrl.view.metrics_file import MetricsFile
from agentrl.view.query import is_failed, is_faulted, is_lost
from agentrl.view.reward_costs import FEWEST_EPISODES, cost_priority, estimate_costs
from agentrl.view.run_messages import RunMessage
from agentrl.view.tool_errors import ToolErrorCount
from agentrl.view.trend import Trend, find_trend

LEAST_COST = 0.03  # of the greatest reward: less is no finding
RECENT = (5, 50)  # steps, at least and at most
MESSAGES = 8  # of the run itself, those that differ in numbers alone as one
LONGEST = 1_200  # characters of one
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class RunFinding(NamedTuple):
    """A sentence; ``query`` finds the episodes that it is about, if there are any."""

    kind: Literal["bad", "note", "good", "said"]  # said: a message of the run itself
    text: str
    query: str = ""


def find_in_training(
    metrics: MetricsFile,
    table: pa.Table,
    tool_errors: Mapping[str, ToolErrorCount],
    messages: Sequence[RunMessage] = (),
) -> list[RunFinding]:
    """List what stands out in a training run, the most important first."""
    steps, rewards = metrics.series("reward")
    whole = find_trend(steps, rewards)
    first = find_recent_start(steps, whole)
    lately = select_recent(table, first)
    where = f"split=train step>={first}"
    signs = list(find_present_signs(metrics))
    return [
        *_find_trend(whole, steps, table),
        *_find_messages(_drop_present_signs(messages, signs), table),
        *find_costs(lately, tool_errors, where),
        *find_faults(lately, where),
        *(() if rewards else find_faults(table, "split=test", "are in no mean")),
        *find_flat_groups(lately, where),
        *find_unsolved_tasks(lately, where),
        *signs,
    ]


def _drop_present_signs(messages: Sequence[RunMessage], signs: Sequence[RunFinding]) -> list[RunMessage]:
    """Drop the messages about signs that still hold: those are listed with present numbers."""
    now = {_NUMBER.sub("#", sign.text) for sign in signs}
    return [message for message in messages if _NUMBER.sub("#", message.text) not in now]


def find_recent_start(steps: list[int], whole: Trend) -> int:
    """Return the first recent step: the start of the flat stretch, or of the last tenth, within ``RECENT``."""
    if not steps:
        return 0
    count = sum(s >= whole.since for s in steps) if whole.word == "flat" else len(steps) // 10
    return steps[-min(max(count, RECENT[0]), RECENT[1], len(steps))]


def select_recent(table: pa.Table, first: int) -> Any:
    """Select the train episodes from a step on."""
    mask = pc.and_(pc.equal(table["split"], "train"), pc.greater_equal(table["step"], first))
    return table.filter(mask).combine_chunks()


def _find_trend(whole: Trend, steps: list[int], table: pa.Table) -> Iterator[RunFinding]:
    if not steps:
        return
    known = as_floats(table["reward"])
    most = float(np.nanmax(known)) if np.isfinite(known).any() else whole.best
    if whole.word == "short":
        count = "one step" if len(steps) == 1 else f"{len(steps)} steps"
        yield RunFinding("note", f"reward is {whole.level:.2f} after {count}: too few to say where it goes")
    elif whole.word == "rising":
        yield RunFinding("good", f"reward rose from {whole.first:.2f} to {whole.level:.2f}, and still rises")
    elif whole.word == "falling":
        yield RunFinding("bad", f"reward fell from {whole.best:.2f} about step {whole.since} to {whole.level:.2f}")
    else:
        flat = sum(s >= whole.since for s in steps)
        text = f"reward is {whole.level:.2f}, and has been flat for {flat} steps, since step {whole.since}"
        if most and whole.level >= 0.9 * most:
            yield RunFinding("good", f"{text}: close to {most:.3g}, the most an episode earned")
        else:
            yield RunFinding(
                "bad", f"{text}; the best episodes earn {most:.3g}", f"split=train step>={whole.since} failed"
            )


def _find_messages(messages: Sequence[RunMessage], table: pa.Table) -> Iterator[RunFinding]:
    """Yield the run's own messages, the latest first; sentences that differ in numbers alone are one."""
    alike: dict[str, list[RunMessage]] = {}
    for message in messages:
        alike.setdefault(_NUMBER.sub("#", message.text), []).append(message)
    latest = sorted(alike.values(), key=lambda those: those[-1].step, reverse=True)
    steps = set(as_floats(table["step"]).tolist())
    for those in latest[:MESSAGES]:
        step, text, _ = those[-1]
        when = f"step {step}" if len(those) == 1 else f"{len(those)} times, last at step {step}"
        shown = escape_controls(truncate(text, LONGEST), newlines=False)
        yield RunFinding("said", f"the run itself said ({when}): {shown}", f"step={step}" if step in steps else "")
    if (earlier := len(latest) - MESSAGES) > 0:
        yield RunFinding("said", f"{earlier} earlier things that the run itself said are in events.jsonl")


def find_costs(lately: pa.Table, tool_errors: Mapping[str, ToolErrorCount], where: str) -> Iterator[RunFinding]:
    """Yield the kinds of episodes that earn less than the others."""
    rewards = as_floats(lately["reward"])
    if np.isfinite(rewards).sum() < FEWEST_EPISODES:
        return
    most = max(float(np.nanmax(rewards)), 1e-9)
    costs = [c for c in estimate_costs(lately, rewards) if c.cost >= LEAST_COST * most and c.share >= 0.03]
    for c in sorted(costs, key=cost_priority, reverse=True)[:5]:
        tool = c.query.partition("failed_tool=")[2].strip('"')
        quote = _quote_error(tool_errors.get(tool)) if "failed_tool=" in c.query else ""
        yield RunFinding(
            "bad",
            f"{c.words}: {c.share:.0%} of the episodes; they earn {c.inside:.2f}, the others {c.outside:.2f}, "
            f"which costs {c.cost:.2f} of reward{quote}",
            f"{where} {c.query}",
        )


def _quote_error(errors: ToolErrorCount | None) -> str:
    if errors is None:
        return ""
    text = escape_controls(truncate(errors.example, 160), newlines=False)
    return f". It says most often ({errors.alike / errors.total:.0%}): \u201c{text}\u201d"


def find_faults(lately: pa.Table, where: str, left_out: str = "are not trained") -> Iterator[RunFinding]:
    """Yield the faults that episodes provoked, then the world's by kind."""
    provoked = int((is_faulted(lately) & ~is_lost(lately)).sum())
    if provoked:
        yield RunFinding(
            "bad" if provoked / lately.num_rows >= LIMITS["lost_episodes"] else "note",
            f"{provoked} episodes ({provoked / lately.num_rows:.1%}) provoked the infrastructure error that ended "
            "them, and earned the floor: docs/faults.md",
            f"{where} faulted",
        )
    mask = is_lost(lately)
    if not mask.any():
        return
    lost = lately.filter(mask)
    counts = sorted(pc.value_counts(lost["fault"]).to_pylist(), key=lambda c: -c["counts"])
    for c in counts[:3]:
        messages = lost.filter(pc.equal(lost["fault"], c["values"]))["fault_message"]
        (first,) = pc.value_counts(messages).to_pylist()[:1]
        share, text = (
            c["counts"] / lately.num_rows,
            escape_controls(truncate(shorten_fault(first["values"] or ""), 240), newlines=False),
        )
        yield RunFinding(
            "bad" if share >= LIMITS["lost_episodes"] else "note",
            f"infrastructure errors ended {c['counts']} episodes ({share:.1%}), which {left_out}: "
            f"{c['values']}, \u201c{text}\u201d",
            f"{where} fault={c['values']}",
        )


def find_flat_groups(lately: pa.Table, where: str) -> Iterator[RunFinding]:
    """Yield the share of the groups whose members all earned the same."""
    starts = np.flatnonzero(as_array(lately["opens"]).to_numpy(zero_copy_only=False))
    if not len(starts):
        return
    rewards, bad = as_floats(lately["reward"]), is_failed(lately)
    low, high = np.fmin.reduceat(rewards, starts), np.fmax.reduceat(rewards, starts)  # nan: nobody is scored
    lost = np.logical_and.reduceat(bad, starts)
    same = is_rounding(high - low, np.maximum(np.abs(low), np.abs(high)))
    compared = np.diff(np.append(starts, len(rewards))).max() > 1  # demonstrations are groups of one
    if compared and same.mean() >= LIMITS["flat_groups"] and len(starts) >= 4:
        yield RunFinding(
            "bad" if (same & lost).mean() >= 0.25 else "note",
            f"{same.mean():.0%} of the groups have zero variance, as all their samples earned the same: "
            f"in {(same & lost).mean():.0%} all failed, in {(same & ~lost).mean():.0%} all succeeded",
            f"{where} advantage=0",
        )


def find_unsolved_tasks(lately: pa.Table, where: str) -> Iterator[RunFinding]:
    """Yield the tasks that were tried often and never done."""
    tasks, bad = as_floats(lately["task"]), is_failed(lately)
    names, own, tries = np.unique(tasks, return_inverse=True, return_counts=True)
    fails = np.bincount(own, weights=bad, minlength=len(names))
    often = tries >= 4
    never = often & (fails == tries)
    if often.sum() >= 4 and never.sum() >= 0.1 * often.sum():
        most = int(names[never][np.argmax(tries[never])])
        yield RunFinding(
            "note",
            f"{never.sum()} of {often.sum()} tasks were never done in at least 4 tries each, such as task {most}",
            f"{where} task={most}",
        )


def find_present_signs(metrics: MetricsFile) -> Iterator[RunFinding]:
    """Yield the signs of trouble that hold now, by the rules that the run itself reports."""
    steps = [
        {name: float(v) for name, v in line.items() if v is not None} for line in metrics.lines if "reward" in line
    ]
    signs = find_signs(History(steps, len(steps)))
    yield from (RunFinding("bad", text) for name, text in signs.items() if name not in _FOUND_ABOVE)
    yield from _held_out(metrics)


# Rules that need the weights of the reward components, or of which the episodes themselves say more.
_FOUND_ABOVE = ("one_part_rules", "flat_groups", "faulting")


def _held_out(metrics: MetricsFile) -> Iterator[RunFinding]:
    steps, held = metrics.series("eval/reward")
    _, train = metrics.series("reward")
    if len(held) < 2 or len(train) < 5:
        return
    now = float(np.mean(train[-5:]))
    if now - held[-1] > max(LIMITS["held_out_gap"] * abs(now), LIMITS["held_out_gap_least"]):
        yield RunFinding(
            "bad",
            f"held-out reward is {held[-1]:.2f} at step {steps[-1]}, training reward {now:.2f}",
            "split=test failed",
        )
    else:
        yield RunFinding("note", f"held-out reward went from {held[0]:.2f} to {held[-1]:.2f}", "split=test")
