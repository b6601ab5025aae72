"""shop as it is played: prices are hidden behind one tool, the sum needs another."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from agentrl_envs import shop_tasks
from agentrl_envs.shop import Shop

from agentrl import ContractError, EnvSpec, Trajectory
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call

TASK = shop_tasks.draw(3, split="train")


async def play(*said: str, task: int = 3, **settings: Any) -> Trajectory:
    return await Rollout(EnvSpec("shop", **settings), ScriptedEngine(said), ByteRenderer()).episode(task)


async def test_look_up_calculate_answer() -> None:
    lookups = "".join(call("price", item=f"{item}s") for item in TASK.basket)
    t = await play(lookups, call("calculator", expression=TASK.expression), f"\\boxed{{{TASK.answer}}}")
    told = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert told == [*(str(TASK.prices[item]) for item in TASK.basket), str(TASK.answer)]
    assert (t.messages[1]["content"], t.reward, t.turns) == (TASK.question, 1.0, 3)


async def test_what_the_shop_does_not_sell() -> None:
    t = await play(call("price", item="dragon"), "\\boxed{0}")
    assert t.messages[3]["content"] == "error: the shop does not sell 'dragon'"
    assert t.reward == 0.0


async def test_both_tools_are_told_of_and_the_price_needs_an_item() -> None:
    tools = EnvSpec("shop").make().tool_list
    assert {t.name for t in tools} == {"price", "calculator"}
    assert {t.name: t.parameters["required"] for t in tools} == {"price": ["item"], "calculator": ["expression"]}


async def test_latency_is_waited_for_together() -> None:
    lookups = "".join(call("price", item=item) for item in ("apple", "bag", "ball", "bed"))
    begun = anyio.current_time()
    t = await play(lookups, "x", latency_s=0.3)
    assert anyio.current_time() - begun >= 0.3
    assert t.timings["tools"] < 1.1
    assert all(c.seconds >= 0.29 for c in t.calls)


async def test_jitter_is_the_tasks_own() -> None:
    drawn = []
    for seed in (3, 3, 4):
        env = Shop(latency_s=0.02, jitter=0.5)
        await env.reset(seed=seed)
        drawn.append(env.random.random())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("settings", [{"latency_s": -1}, {"jitter": -0.5}])
async def test_wrong_settings_are_sentences(settings: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="env 'shop': latency_s and jitter are 0 or more"):
        await play("x", **settings)
