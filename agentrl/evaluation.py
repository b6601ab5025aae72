"""Measuring a policy on tasks: sampled as in training, or greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import anyio

from agentrl import metrics
from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError
from agentrl.policy import configured
from agentrl.rollout import Rollout, Watch
from agentrl.types import Trajectory


@dataclass(frozen=True)
class Measurement:
    """A mean reward over episodes, with its standard error, and how the tools were used."""

    reward: float
    error: float
    episodes: int
    calls: float  # tool calls an episode
    valid_calls: float  # share of the calls that a tool answered; 0 without calls
    turns: float
    faults: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


async def measure(
    rollout: Rollout, tasks: Sequence[int], *, seed: int = 0, greedy: bool = False, watch: Watch | None = None
) -> tuple[Measurement, list[Trajectory]]:
    """One episode a task.

    Raises:
        UserError: not one episode could be scored; the sentence tells the first fault.
    """
    sampling = replace(rollout.sampling, temperature=0.0) if greedy else rollout.sampling
    groups = await replace(rollout, sampling=sampling).batch(tasks, 1, seed=seed, watch=watch)
    played = [t for g in groups for t in g]
    return summarize(played), played


def summarize(played: Sequence[Trajectory]) -> Measurement:
    fair = [t for t in played if t.reward is not None]
    if not fair:
        raise UserError(f"not one of {len(played)} episodes could be scored. {first_fault(played)}")
    rewards = [t.reward for t in fair if t.reward is not None]
    calls = metrics.of_calls(fair)
    return Measurement(
        reward=fmean(rewards),
        error=stdev(rewards) / sqrt(len(rewards)) if len(rewards) > 1 else 0.0,
        episodes=len(fair),
        calls=calls.get("tools/call_frequency", 0.0),
        valid_calls=1.0 - calls["tools/failure_frequency"] if "tools/failure_frequency" in calls else 0.0,
        turns=fmean(t.turns for t in fair),
        faults=sum(t.fault is not None for t in played),
    )


def first_fault(played: Sequence[Trajectory]) -> str:
    """The first fault in words, for when there is nothing but faults."""
    for t in played:
        if t.fault is not None:
            return f"The first fault ({t.fault.kind}): {t.fault.message}"
    return "Every reward was None: no reward function applied."


def held_out(spec: EnvSpec, wanted: int, split: str = "test", first: int = 0) -> list[int]:
    """Tasks of a split, from ``first`` on: ``wanted`` of them, or as many as there are."""
    count = spec.make().count(split)
    if count is not None and first >= count:
        raise UserError(f"split {split!r} of env {spec.name!r} has {count} tasks; there is none from {first} on")
    return list(range(first, first + wanted if count is None else min(first + wanted, count)))


def evaluate(
    env: str | type[Env],
    model: str = "nano",
    *,
    tasks: int = 256,
    first: int = 0,
    split: str = "test",
    greedy: bool = False,
    **settings: Any,
) -> Measurement:
    """Measure a model on ``tasks`` tasks of an environment.

    Args:
        env: a registered name, ``module:Class``, or an ``Env`` subclass.
        model: a name or folder, as ``--model`` takes it.
        settings: sections and keys as in a config file: ``rollout={"max_turn_tokens": 64}``, ``env_settings={...}``.
    """
    from agentrl.session import opened  # brings torch

    spec = EnvSpec(env, **settings.pop("env_settings", {}))
    named = {"name": spec.name, **spec.settings}
    config = configured(("arguments", {"env": named, "model": model, **settings}))

    async def go() -> Measurement:
        async with opened(config, spec) as session:
            rollout = session.rollout(split)
            found, _ = await measure(rollout, held_out(spec, tasks, split, first), seed=config.seed, greedy=greedy)
            return found

    return anyio.run(go)
