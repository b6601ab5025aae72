"""Stored episodes, scored anew: by the environment as it is now, or by other reward functions. Nothing is played."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from agentrl.aside import together
from agentrl.contract import checked_reset, checked_rewards, checked_step
from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError, WorldFault
from agentrl.rewards import Reward, called
from agentrl.stored import Place
from agentrl.types import Message, Reply, ToolCall, Trajectory

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
    stored: Iterable[tuple[Place, Trajectory]],
    functions: Mapping[str, Reward] | None = None,
    *,
    act: bool = False,
    timeout_s: float = 120.0,
) -> AsyncIterator[Rescored]:
    """Each episode that ended without a fault.

    Args:
        spec: open.
        functions: instead of the environment's ``score``; the episode's task is reset all the same, and what that tells
            in ``info`` is a column each.
        act: the replies are given to the environment again, tools and all: for one whose score is about the state it
            is in.
    """
    left = iter((w, t) for w, t in stored if t.fault is None)
    send, receive = anyio.create_memory_object_stream[Rescored](AT_ONCE)

    async def work() -> None:
        for where, trajectory in left:
            await send.send(await _one(spec, where, trajectory, functions, act, timeout_s))

    async def all_of_it() -> None:
        async with send, together() as workers:
            for _ in range(AT_ONCE):
                workers.start_soon(work)

    async with together() as tasks:
        tasks.start_soon(all_of_it)
        async with receive:
            async for found in receive:
                yield found


async def _one(
    spec: EnvSpec,
    where: Place,
    before: Trajectory,
    functions: Mapping[str, Reward] | None,
    act: bool,
    timeout_s: float,
) -> Rescored:
    env = spec.make()
    try:
        with anyio.fail_after(timeout_s):
            found = await env.reset(seed=before.task, options={"split": where.split})
            _, info = checked_reset(found, env)
            if act:
                await _act(env, before)
            parts = await env.score(before) if functions is None else await _called(functions, before, info)
        rewards = checked_rewards(parts, env)
    except UserError:
        raise
    except Exception as error:  # around an episode
        kind = error.kind if isinstance(error, WorldFault) else type(error).__name__
        return Rescored(where, before, None, None, f"{kind}: {error}")
    finally:
        with anyio.CancelScope(shield=True):
            await env.close()
            await env.close_tools()
    weights = env.reward_weights if functions is None else {}
    known = [weights.get(n, 1.0) * r for n, r in rewards.items() if r is not None]
    return Rescored(where, before, rewards, sum(known) if known else None)


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


async def _called(functions: Mapping[str, Reward], before: Trajectory, info: Mapping[str, Any]) -> Rewards:
    first = next((i for i, m in enumerate(before.messages) if m["role"] == "assistant"), len(before.messages))
    columns: dict[str, Any] = {name: [value] for name, value in info.items()}
    columns["prompts"] = [list(before.messages[:first])]
    columns["completions"] = [list(before.messages[first:])]
    columns["completion_ids"] = [[t for s in before.segments if s.author == "model" for t in s.token_ids]]
    return {name: await called(name, function, columns) for name, function in functions.items()}
