"""Gymnasium, both ways: its frozen lake as one of our environments, and one of ours as its.

Run it: python examples/frozen_lake.py
A model is trained on the same lake by: train(env=Lake, model="Qwen/Qwen3-0.6B"), or on the command line by
agentrl train --env gym:FrozenLake-v1 --env.make.is_slippery false --model Qwen/Qwen3-0.6B
"""

import random

import anyio

from agentrl import EnvSpec, as_gymnasium, from_gymnasium
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine

Lake = from_gymnasium("FrozenLake-v1", make={"is_slippery": False}, max_turns=20)
WAY = ("down", "down", "right", "down", "right", "right")


async def rewards(said: ScriptedEngine, episodes: int) -> list[float]:
    """Play: the engine stands where a model would."""
    async with EnvSpec(Lake).open() as spec:
        groups = await Rollout(spec, said, ByteRenderer()).batch(range(episodes), 1)
    return [t.reward or 0.0 for group in groups for t in group]


def main(episodes: int = 50) -> None:
    rng = random.Random(0)
    for name, engine in {
        "at random": ScriptedEngine(lambda *_: rng.choice(["left", "down", "right", "up"])),
        "who knows the way": ScriptedEngine([f"I go \\boxed{{{move}}}." for move in WAY]),
        "who says nothing": ScriptedEngine([""]),
    }.items():
        found = anyio.run(rewards, engine, episodes)
        print(f"{name:>18}: mean reward {sum(found) / len(found):.2f} of {len(found)} episodes")

    env = as_gymnasium("math-tools")  # a gymnasium.Env: text in, messages out
    messages, _ = env.reset(seed=3)
    print(messages[-1]["content"])
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "25*370-552-6+3230"}}</tool_call>'
    messages, *_ = env.step(call)
    _, reward, *_ = env.step(f"\\boxed{{{messages[0]['content']}}}")
    print(f"reward {reward:g}")
    env.close()


if __name__ == "__main__":
    main()
