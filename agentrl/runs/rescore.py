"""Stored episodes, scored anew: by the environment as it is now, or by other reward functions. Nothing is played."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from agentrl.aside import together
from agentrl.contract import checked_reset, checked_rewards, checked_step
from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError, WorldFault
from agentrl.group_scoring import score_group
from agentrl.reward_log import RewardLog
from agentrl.rewards import Reward, call_rewards, is_per_episode
from agentrl.stored import Place
from agentrl.types import Fault, Message, Reply, ToolCall, Trajectory

AT_ONCE = 32
Rewards = Mapping[str, float | None]


@dataclass(frozen=True)
class Rescored:
    """An episode's rewards, as they were and as they are; ``None`` and why, where it could not be scored."""

    where: Place
    before: Trajectory
    rewards: Rewards | None
    reward: float | None
    why: str = ""


async def rescored(
    spec: EnvSpec,
    groups: Iterable[Sequence[tuple[Place, Trajectory]]],
    functions: Mapping[str, Reward] | None = None,
    *,
    act: bool = False,
    timeout_s: float = 120.0,
) -> AsyncIterator[Rescored]:
    """Each episode that ended without a fault.

    Args:
        spec: open.
        groups: the episodes, those together that are compared with each other.
        functions: instead of the environment's ``score``; the episode's task is reset all the same, and what that tells
            in ``info`` is a column each.
        act: the replies are given to the environment again, tools and all: for one whose score is about the state it
            is in.
    """
    fair = ([(where, t) for where, t in group if t.fault is None] for group in groups)
    left = iter([group for group in fair if group])
    scoring = _Scoring(spec, functions, act, timeout_s)
    send, receive = anyio.create_memory_object_stream[Rescored](AT_ONCE)

    async def work() -> None:
        for group in left:
            for one in await scoring.of_group(group):
                await send.send(one)

    async def all_of_it() -> None:
        async with send, together() as workers:
            for _ in range(AT_ONCE):
                workers.start_soon(work)

    async with together() as tasks:
        tasks.start_soon(all_of_it)
        async with receive:
            async for found in receive:
                yield found


@dataclass(frozen=True)
class _Scoring:
    """How the episodes of a run are scored anew."""

    spec: EnvSpec
    functions: Mapping[str, Reward] | None
    act: bool
    timeout_s: float

    async def of_group(self, group: Sequence[tuple[Place, Trajectory]]) -> list[Rescored]:
        """Score each member by itself, then those that could be scored together."""
        members: list[tuple[Env | None, Trajectory]] = [(None, t) for _, t in group]

        async def one(number: int) -> None:
            members[number] = await self._of_episode(*group[number])

        async with together() as episodes:
            for number in range(len(group)):
                episodes.start_soon(one, number)
        if (env := next((e for e, t in members if e is not None and t.fault is None), None)) is not None:
            after = await self._together(env, [t for _, t in members])
        else:
            after = [t for _, t in members]
        return [_found(where, before, t) for (where, before), t in zip(group, after, strict=True)]

    async def _of_episode(self, where: Place, before: Trajectory) -> tuple[Env | None, Trajectory]:
        """Score an episode; return its environment, closed, and the episode with new rewards, or its fault."""
        env = self.spec.make()
        bare = replace(before, rewards={}, metrics={}, weights=env.reward_weights if self.functions is None else {})
        try:
            with anyio.fail_after(self.timeout_s):
                found = await env.reset(seed=before.task, options={"split": where.split})
                _, info = checked_reset(found, env)
                if self.act:
                    await _act(env, before)
                if self.functions is not None:
                    own = {name: f for name, f in self.functions.items() if is_per_episode(f)}
                    return env, (await _scored(own, [replace(bare, info=info)]))[0]
                return env, bare.with_rewards(checked_rewards(await env.score(before), env))
        except UserError:
            raise
        except Exception as error:  # around an episode
            kind = error.kind if isinstance(error, WorldFault) else type(error).__name__
            return env, replace(bare, fault=Fault(kind, str(error)))
        finally:
            with anyio.CancelScope(shield=True):
                await env.close()
                await env.close_tools()

    async def _together(self, env: Env, members: Sequence[Trajectory]) -> Sequence[Trajectory]:
        if self.functions is not None:
            env = _Compared({name: f for name, f in self.functions.items() if not is_per_episode(f)})
        return await score_group(env, members, self.timeout_s) if env.scores_groups else members


class _Compared(Env):
    """An environment that scores by reward functions alone, all of a group at once."""

    def __init__(self, functions: Mapping[str, Reward]) -> None:
        self.functions, self.scores_groups = functions, bool(functions)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return await _scored(self.functions, trajectories)


async def _scored(functions: Mapping[str, Reward], trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    if not functions:
        return list(trajectories)
    rewards = await call_rewards(functions, _columns(trajectories), RewardLog(len(trajectories)))
    return [t.with_rewards(own) for t, own in zip(trajectories, rewards, strict=True)]


def _found(where: Place, before: Trajectory, after: Trajectory) -> Rescored:
    if after.fault is not None:
        return Rescored(where, before, None, None, f"{after.fault.kind}: {after.fault.message}")
    return Rescored(where, before, after.rewards, after.reward)


async def _act(env: Env, before: Trajectory) -> None:
    for message in before.messages:
        if message["role"] == "assistant":
            step = checked_step(await env.step(reply_of(message)), env)
            if step.terminated or step.truncated:
                return


def reply_of(message: Message) -> Reply:
    """What the model said, as the environment is given it; a call that could not be read has no arguments."""
    calls = [
        ToolCall(c.get("id", ""), c["function"]["name"], c["function"]["arguments"])
        for c in message.get("tool_calls") or ()
    ]
    return Reply(message["content"], tuple(calls))


def _columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    names = {name for t in trajectories for name in t.info}
    columns: dict[str, list[Any]] = {name: [t.info.get(name) for t in trajectories] for name in sorted(names)}
    split = [
        next((i for i, m in enumerate(t.messages) if m["role"] == "assistant"), len(t.messages)) for t in trajectories
    ]
    columns["prompts"] = [list(t.messages[:at]) for t, at in zip(trajectories, split, strict=True)]
    columns["completions"] = [list(t.messages[at:]) for t, at in zip(trajectories, split, strict=True)]
    columns["completion_ids"] = [
        [i for s in t.segments if s.author == "model" for i in s.token_ids] for t in trajectories
    ]
    return columns
