"""What stands out in a run, in sentences: pure functions of its curves and its index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc

from agentrl.health import LIMITS, History, find_signs
from agentrl.spread import is_rounding
from agentrl.view.costs import FEWEST, costs, telling
from agentrl.view.curves import Curves
from agentrl.view.index import numbers, one
from agentrl.view.query import failed, faulted
from agentrl.view.refusals import Refusals
from agentrl.view.text import cut, visible
from agentrl.view.told import Said
from agentrl.view.trend import Trend, trend

LEAST_COST = 0.03  # of the greatest reward there was: what costs less is not told
RECENT = (5, 50)  # steps, at least and at most
TOLD = 8  # kinds of things that the run itself said
LONGEST = 1_200  # characters of one
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Finding(NamedTuple):
    """A sentence; ``query`` finds the episodes that it is about, where there are any."""

    kind: Literal["bad", "note", "good", "said"]  # said: by the run itself
    text: str
    query: str = ""


def findings(curves: Curves, table: Any, refused: Mapping[str, Refusals], said: Sequence[Said] = ()) -> list[Finding]:
    """The most important first."""
    steps, rewards = curves.series("reward")
    whole = trend(steps, rewards)
    first = recent_from(steps, whole)
    lately = recent(table, first)
    where = f"split=train step>={first}"
    signs = list(of_curves(curves))
    return [
        *of_trend(whole, steps, table),
        *of_told(_not_among(said, signs), table),
        *of_costs(lately, refused, where),
        *of_faults(lately, where),
        *of_groups(lately, where),
        *of_tasks(lately, where),
        *signs,
    ]


def _not_among(said: Sequence[Said], signs: Sequence[Finding]) -> list[Said]:
    """Select what the run said of itself, but for signs that still hold: those are told with present numbers."""
    now = {_NUMBER.sub("#", sign.text) for sign in signs}
    return [one_said for one_said in said if _NUMBER.sub("#", one_said.text) not in now]


def recent_from(steps: list[int], whole: Trend) -> int:
    """The first of the steps that are looked at: those of the flat stretch, or the last tenth."""
    if not steps:
        return 0
    count = sum(s >= whole.since for s in steps) if whole.word == "flat" else len(steps) // 10
    return steps[-min(max(count, RECENT[0]), RECENT[1], len(steps))]


def recent(table: Any, first: int) -> Any:
    """The train episodes from a step on."""
    mask = pc.and_(pc.equal(table["split"], "train"), pc.greater_equal(table["step"], first))
    return table.filter(mask).combine_chunks()


def of_trend(whole: Trend, steps: list[int], table: Any) -> Iterator[Finding]:
    if not steps:
        return
    known = numbers(table["reward"])
    most = float(np.nanmax(known)) if np.isfinite(known).any() else whole.best
    if whole.word == "short":
        yield Finding("note", f"reward is {whole.level:.2f} after {len(steps)} steps: too few to say where it goes")
    elif whole.word == "rising":
        yield Finding("good", f"reward rose from {whole.first:.2f} to {whole.level:.2f}, and still rises")
    elif whole.word == "falling":
        yield Finding("bad", f"reward fell from {whole.best:.2f} about step {whole.since} to {whole.level:.2f}")
    else:
        flat = sum(s >= whole.since for s in steps)
        text = f"reward is {whole.level:.2f}, and has been flat for {flat} steps, since step {whole.since}"
        if most and whole.level >= 0.9 * most:
            yield Finding("good", f"{text}: close to {most:.3g}, the most an episode earned")
        else:
            yield Finding(
                "bad", f"{text}; the best episodes earn {most:.3g}", f"split=train step>={whole.since} failed"
            )


def of_told(said: Sequence[Said], table: Any) -> Iterator[Finding]:
    """What the run said of itself, the latest first; sentences that differ in numbers alone are one."""
    alike: dict[str, list[Said]] = {}
    for one_said in said:
        alike.setdefault(_NUMBER.sub("#", one_said.text), []).append(one_said)
    latest = sorted(alike.values(), key=lambda those: those[-1].step, reverse=True)
    there = set(numbers(table["step"]).tolist())
    for those in latest[:TOLD]:
        step, text = those[-1]
        when = f"step {step}" if len(those) == 1 else f"{len(those)} times, last at step {step}"
        shown = visible(cut(text, LONGEST), newlines=False)
        yield Finding("said", f"the run itself said ({when}): {shown}", f"step={step}" if step in there else "")
    if len(latest) > TOLD:
        yield Finding("said", f"{len(latest) - TOLD} earlier things that the run itself said are in told.jsonl")


def of_costs(lately: Any, refused: Mapping[str, Refusals], where: str) -> Iterator[Finding]:
    """What episodes have in common that earn less."""
    rewards = numbers(lately["reward"])
    if np.isfinite(rewards).sum() < FEWEST:
        return
    most = max(float(np.nanmax(rewards)), 1e-9)
    found = [c for c in costs(lately, rewards) if c.cost >= LEAST_COST * most and c.share >= 0.03]
    for c in sorted(found, key=telling, reverse=True)[:5]:
        tool = c.query.partition("refused_by=")[2].strip('"')
        said = _most_said(refused.get(tool)) if "refused_by=" in c.query else ""
        yield Finding(
            "bad",
            f"{c.words}: {c.share:.0%} of the episodes; they earn {c.inside:.2f}, the others {c.outside:.2f}, "
            f"which costs {c.cost:.2f} of reward{said}",
            f"{where} {c.query}",
        )


def _most_said(said: Refusals | None) -> str:
    if said is None:
        return ""
    text = visible(cut(said.example, 160), newlines=False)
    return f". It says most often ({said.alike / said.total:.0%}): \u201c{text}\u201d"


def of_faults(lately: Any, where: str) -> Iterator[Finding]:
    """The world's failures, by kind."""
    mask = faulted(lately)
    if not mask.any():
        return
    lost = lately.filter(mask)
    counts = sorted(pc.value_counts(lost["fault"]).to_pylist(), key=lambda c: -c["counts"])
    for c in counts[:3]:
        messages = lost.filter(pc.equal(lost["fault"], c["values"]))["fault_message"]
        (first,) = pc.value_counts(messages).to_pylist()[:1]
        share, text = c["counts"] / lately.num_rows, visible(cut(first["values"] or "", 160), newlines=False)
        yield Finding(
            "bad" if share >= LIMITS["lost_episodes"] else "note",
            f"the world failed in {c['counts']} episodes ({share:.1%}), which are not trained: "
            f"{c['values']}, \u201c{text}\u201d",
            f"{where} fault={c['values']}",
        )


def of_groups(lately: Any, where: str) -> Iterator[Finding]:
    """Groups whose members all earned the same teach nothing."""
    starts = np.flatnonzero(one(lately["opens"]).to_numpy(zero_copy_only=False))
    if not len(starts):
        return
    rewards, bad = numbers(lately["reward"]), failed(lately)
    low, high = np.fmin.reduceat(rewards, starts), np.fmax.reduceat(rewards, starts)  # nan: nobody is scored
    lost = np.logical_and.reduceat(bad, starts)
    same = is_rounding(high - low, np.maximum(np.abs(low), np.abs(high)))
    if same.mean() >= LIMITS["flat_groups"] and len(starts) >= 4:
        yield Finding(
            "bad" if (same & lost).mean() >= 0.25 else "note",
            f"{same.mean():.0%} of the groups teach nothing, as all members earned the same: "
            f"in {(same & lost).mean():.0%} all failed, in {(same & ~lost).mean():.0%} all succeeded",
            f"{where} advantage=0",
        )


def of_tasks(lately: Any, where: str) -> Iterator[Finding]:
    """Tasks that were tried often and never done."""
    tasks, bad = numbers(lately["task"]), failed(lately)
    names, own, tries = np.unique(tasks, return_inverse=True, return_counts=True)
    fails = np.bincount(own, weights=bad, minlength=len(names))
    often = tries >= 4
    never = often & (fails == tries)
    if often.sum() >= 4 and never.sum() >= 0.1 * often.sum():
        most = int(names[never][np.argmax(tries[never])])
        yield Finding(
            "note",
            f"{never.sum()} of {often.sum()} tasks were never done in at least 4 tries each, such as task {most}",
            f"{where} task={most}",
        )


def of_curves(curves: Curves) -> Iterator[Finding]:
    """Yield the signs of trouble that hold now: what the run itself looks for."""
    steps = [{name: float(v) for name, v in line.items() if v is not None} for line in curves.lines if "reward" in line]
    signs = find_signs(History(steps, len(steps)))
    yield from (Finding("bad", text) for name, text in signs.items() if name not in _TOLD_ABOVE)
    yield from _held_out(curves)


# Rules that need the weights of the reward's parts, or that the episodes themselves tell better.
_TOLD_ABOVE = ("one_part_rules", "flat_groups", "faulting")


def _held_out(curves: Curves) -> Iterator[Finding]:
    steps, held = curves.series("eval/reward")
    _, train = curves.series("reward")
    if len(held) < 2 or len(train) < 5:
        return
    now = float(np.mean(train[-5:]))
    if now - held[-1] > max(LIMITS["held_out_gap"] * abs(now), LIMITS["held_out_gap_least"]):
        yield Finding(
            "bad",
            f"held-out reward is {held[-1]:.2f} at step {steps[-1]}, training reward {now:.2f}",
            "split=test failed",
        )
    else:
        yield Finding("note", f"held-out reward went from {held[0]:.2f} to {held[-1]:.2f}", "split=test")
