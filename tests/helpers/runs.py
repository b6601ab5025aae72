"""Run folders as a training writes them, of episodes that nobody played."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import agentrl_envs.nano
from tokenizers import Tokenizer

from agentrl.credit import Credit, assign_credit
from agentrl.learner.advantages.group import grpo
from agentrl.learner.losses.losses import dapo
from agentrl.learner.losses.reduction import reduce_rows
from agentrl.runs.folder import RunFolder
from agentrl.runs.metrics import credit_metrics, group_metrics
from agentrl.runs.writer import LearnedTokens
from agentrl.types import CallRecord, Fault, Group, Message, Segment, Stop, Trajectory

CONFIG = (
    'model = "nano"\nsteps = {steps}\nseed = 0\n\n[env]\nname = "shop"\n\n[learner]\nadvantage = "grpo"\nlr = 0.001\n'
)
CLOSED = "error: the catalogue knows no item {item!r}: items are given by number"


@cache
def tokenizer() -> Any:
    return Tokenizer.from_file(str(Path(agentrl_envs.nano.path()) / "tokenizer.json"))


def segment(author: Any, text: str, version: int = 0) -> Segment:
    ids = tuple(tokenizer().encode(text, add_special_tokens=False).ids)
    if author != "model":
        return Segment(author, ids)
    return Segment(author, ids, tuple(-0.1 * (i % 7) for i in range(len(ids))), (version,) * len(ids))


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def played(
    task: int,
    said: Sequence[Message],
    reward: float | None,
    *,
    calls: Sequence[CallRecord] = (),
    stop: Stop = Stop.TERMINATED,
    fault: Fault | None = None,
    version: int = 0,
    info: Mapping[str, Any] | None = None,
) -> Trajectory:
    """An episode of a conversation; each message is a segment."""
    authors = {"assistant": "model", "tool": "env"}
    return Trajectory(
        task=task,
        segments=tuple(segment(authors.get(m["role"], "prompt"), m["content"] or "call", version) for m in said),
        messages=tuple(said),
        stop=Stop.FAULT if fault else stop,
        rewards={"correct": reward},
        timings={
            "generate": 0.5,
            "tools": sum(c.seconds for c in calls),
            "total": 0.75 + sum(c.seconds for c in calls),
        },
        calls=tuple(calls),
        fault=fault,
        info=info or {},
    )


def right(task: int) -> dict[str, str]:
    return {"expected": str(7 * task)}


def solved(task: int, version: int = 0) -> Trajectory:
    said: list[Message] = [
        {"role": "user", "content": f"What do {task} hats cost?"},
        {"role": "assistant", "content": "", "tool_calls": [call("price", item="hat")]},  # type: ignore[list-item]
        {"role": "tool", "content": "7", "tool_call_id": "c0", "name": "price"},
        {"role": "assistant", "content": f"The answer is {7 * task}."},
    ]
    return played(task, said, 1.0, calls=[CallRecord(0, "price", "ok", 0.01)], version=version, info=right(task))


def wrong(task: int, version: int = 0) -> Trajectory:
    said: list[Message] = [
        {"role": "user", "content": f"What do {task} hats cost?"},
        {"role": "assistant", "content": "I do not know."},
    ]
    return played(task, said, 0.0, version=version, info=right(task))


def stuck(task: int, version: int = 0) -> Trajectory:
    """It asks the catalogue by name again and again, and is refused, until its turns are used up."""
    said: list[Message] = [{"role": "user", "content": f"What does item {task} of the catalogue cost?"}]
    for turn in range(4):
        item = ["hat", "cup", "bed", "shoe"][(task + turn) % 4]
        said.append({"role": "assistant", "content": "", "tool_calls": [call("catalogue", turn, item=item)]})  # type: ignore[list-item]
        said.append(
            {"role": "tool", "content": CLOSED.format(item=item), "tool_call_id": f"c{turn}", "name": "catalogue"}
        )
    calls = [CallRecord(turn, "catalogue", "unknown_tool", 0.002) for turn in range(4)]
    return played(task, said, 0.0, calls=calls, stop=Stop.MAX_TURNS, version=version)


def lost(task: int, version: int = 0) -> Trajectory:
    said: list[Message] = [{"role": "user", "content": "What do hats cost?"}]
    slow = [CallRecord(0, "price", "tool_timeout", 30.0)]
    return played(
        task, said, 0.0, calls=slow, fault=Fault("tool_timeout", "price took more than 30 s"), version=version
    )


APART = (0.0, 0.03, -0.03, 0.3, -0.3, 1.0, -1.0)  # the learner's logprobs from the engine's


def learned(trajectory: Trajectory) -> LearnedTokens:
    """Make what a learner knows of each token: logprobs apart from the engine's, corrections that are not cut."""
    own = [p for s in trajectory.segments for p in s.logprobs or ()]
    apart = [APART[i % len(APART)] for i in range(len(own))]
    return LearnedTokens([p + a for p, a in zip(own, apart, strict=True)], [-0.25] * len(own), [exp(a) for a in apart])


def credited(groups: Sequence[Group], advantages: Sequence[Sequence[Any]]) -> Credit:
    """The ledger of a step whose rule gives these advantages, whatever the rewards."""

    def rule(members: Sequence[Sequence[Trajectory]]) -> list[list[Any]]:
        return [
            [a for t, a in zip(g, own, strict=True) if t.fault is None]
            for g, own in zip(groups, advantages, strict=True)
        ]

    return assign_credit(groups, rule, reduce=lambda lengths: reduce_rows(dapo, lengths, 1), min_group_size=0)


def write(
    run: RunFolder,
    step: int,
    groups: Sequence[Group],
    mask_stop_reasons: frozenset[Stop] = frozenset(),
    **metrics: float,
) -> None:
    """A step, as a training writes it."""
    credit = assign_credit(
        groups, grpo, reduce=lambda lengths: reduce_rows(dapo, lengths, 1), mask_stop_reasons=mask_stop_reasons
    )
    own = [[learned(e.trajectory) if e.outcome == "trained" else None for e in its] for its in credit.entries]
    run.write_trajectories(step, credit, learned=own)
    times = {"time/generate": 1.0, "time/tools": 0.2, "time/learn": 0.5, "step_time": 1.8, "tokens_per_second": 9.0}
    values = {**group_metrics(groups), **credit_metrics(credit), "entropy": 0.5, "policy_version": float(step)}
    run.log({"step": step, **values, **times, **metrics})


def start(folder: Path, steps: int = 40) -> RunFolder:
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(steps=steps))
    return RunFolder(folder)


def broken(folder: Path, steps: int = 40, tasks: int = 8, size: int = 4) -> Path:
    """A run whose reward rises to 0.6 and stops there: two tasks in five need a tool that always refuses."""
    run, random = start(folder, steps), Random(0)
    for step in range(1, steps + 1):
        skill = min(1.0, 0.1 + step / 12)
        groups = []
        for task in range((step - 1) * tasks, step * tasks):
            members = [_member(task, skill, random, step - 1) for _ in range(size)]
            groups.append(Group(task, tuple(members)))
        write(run, step, groups)
    return folder


def _member(task: int, skill: float, random: Random, version: int) -> Trajectory:
    if task % 5 < 2:
        return stuck(task, version)
    return solved(task, version) if random.random() < skill else wrong(task, version)


def of(
    folder: Path, trajectories: Iterable[Trajectory], step: int = 1, mask_stop_reasons: frozenset[Stop] = frozenset()
) -> Path:
    """A run of one group."""
    members = tuple(trajectories)
    group = Group(members[0].task, tuple(replace(t, task=members[0].task) for t in members))
    write(start(folder, 1), step, [group], mask_stop_reasons)
    return folder


def rewarded(task: int, reward: float) -> Trajectory:
    """A wrong episode that is paid nevertheless."""
    return replace(wrong(task), rewards={"correct": reward})
