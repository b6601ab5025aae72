"""Measuring a policy on tasks: sampled as in training, or greedy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from agentrl import aside, metrics
from agentrl.config import TrainConfig
from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError
from agentrl.layers import build
from agentrl.policy import Policy, resolved
from agentrl.renderer.chat import ChatRenderer
from agentrl.rollout import Rollout, Watch
from agentrl.tasks import task_integer
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
    """Return tasks of a split, from index ``first`` on: ``wanted`` of them, or as many as there are.

    Where the environment generates tasks, those of a split but ``train`` are integers on which no run trains.
    """
    count = spec.make().count(split)
    if count is not None and first >= count:
        raise UserError(f"split {split!r} of env {spec.name!r} has {count} tasks; there is none from {first} on")
    if count is None:
        return [task_integer(split, index) for index in range(first, first + wanted)]
    return list(range(first, min(first + wanted, count)))


Playing = AbstractAsyncContextManager[Callable[[str], Rollout]]  # inside, what makes the rollout of a split


@asynccontextmanager
async def with_model(
    config: TrainConfig, spec: EnvSpec, loaded: Policy | None = None
) -> AsyncIterator[Callable[[str], Rollout]]:
    """Play with a model of our own."""
    from agentrl.session import opened  # brings torch

    async with opened(config, spec, loaded) as session:
        yield session.rollout


@asynccontextmanager
async def at_endpoint(
    config: TrainConfig, spec: EnvSpec, url: str, model: str | None = None, key_env: str = "OPENAI_API_KEY"
) -> AsyncIterator[Callable[[str], Rollout]]:
    """Play with a server's model, by OpenAI's chat completions; ``None``: the only one it has. No torch."""
    from agentrl.engines.endpoint import EndpointEngine

    engine = EndpointEngine(url, model, key_env=key_env, capacity=config.engine.capacity)
    async with spec.open(), engine:
        yield partial(Rollout.configured, config.rollout, spec, engine, ChatRenderer())


def evaluate(
    env: str | type[Env],
    model: Any = None,
    *,
    tokenizer: Any = None,
    tasks: int = 256,
    first: int = 0,
    split: str = "test",
    greedy: bool = False,
    endpoint: str | None = None,
    **settings: Any,
) -> Measurement:
    """Measure a model on ``tasks`` tasks of an environment.

    Args:
        env: a registered name, ``module:Class``, or an ``Env`` subclass.
        model: a name or folder, as ``--model`` takes it; nano by default; or a loaded causal LM. With an endpoint, a
            name that it knows.
        tokenizer: of a loaded model; found by its name by default.
        endpoint: a server that speaks OpenAI's chat completions; its key is in the environment, OPENAI_API_KEY.
        settings: sections and keys as in a config file: ``rollout={"max_turn_tokens": 64}``, ``env_settings={...}``.
    """
    spec = EnvSpec(env, **settings.pop("env_settings", {}))
    settings["env"] = {"name": spec.name, **spec.settings}
    if endpoint is None:
        config, loaded = resolved(settings, model or "nano", tokenizer)
        playing = with_model(config, spec.equipped(config.tools, config.tool), loaded)
    else:
        config = build(("arguments", settings))
        spec.equipped(config.tools, config.tool)
        playing = at_endpoint(config, spec, endpoint, model)

    async def go() -> Measurement:
        async with playing as rollout_of:
            chosen = held_out(spec, tasks, split, first)
            found, _ = await measure(rollout_of(split), chosen, seed=config.seed, greedy=greedy)
            return found

    return aside.run(go)
