"""shop: the prices are hidden behind one tool, the sum needs another: two to four calls, each on the last's result."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import anyio

from agentrl import ContractError, Message, ToolCall, ToolEnv, ToolError, Trajectory, tool
from agentrl.environments.task_sampler import task_index
from agentrl.types import ExpertTurn, Observation
from agentrl_envs import shop_tasks
from agentrl_envs.rewards import extract_boxed, is_same_answer

ANSWERS = ("The answer is \\boxed{{{}}}.", "\\boxed{{{}}}", "That costs \\boxed{{{}}}.")


class Shop(ToolEnv):
    r"""The cost of a basket: look up each price, calculate, answer in ``\boxed{}``.

    Args:
        latency_s: how long a look-up takes, in seconds.
        jitter: the sigma of a log-normal factor on the latency; 0: every look-up takes the same.
    """

    system_prompt = shop_tasks.SYSTEM_PROMPT
    tools = ("calculator",)
    max_turns = 6

    def __init__(self, latency_s: float = 0.0, jitter: float = 0.0) -> None:
        super().__init__()
        if latency_s < 0 or jitter < 0:
            raise ContractError(f"env 'shop': latency_s and jitter are 0 or more, not {latency_s:g} and {jitter:g}")
        self.latency_s, self.jitter = latency_s, jitter

    @tool
    async def price(self, item: str) -> int:
        """The price of one piece of an item.

        Args:
            item: the item's name, such as "lamp".
        """
        if self.latency_s:
            await anyio.sleep(self.latency_s * self.random.lognormvariate(0.0, self.jitter))
        if (found := self.task.price(item)) is None:
            raise ToolError(f"the shop does not sell {item!r}")
        return found

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.task = shop_tasks.draw(seed, split=(options or {}).get("split", "train"))
        self.random = random.Random(task_index(seed))
        return self.ask(self.task.question), {"items": len(self.task.basket), "expected": str(self.task.answer)}

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Look up the prices, together or one by one; calculate; answer."""
        rng, basket = random.Random(self.task.question), self.task.basket
        calls = [ToolCall.of("price", item=item) for item in basket]
        if rng.random() < 0.5:
            prices = [m["content"] for m in (yield calls)]
        else:
            prices = []
            for call in calls:
                prices += [m["content"] for m in (yield call)]
        terms = [f"{count}*{price}" for count, price in zip(basket.values(), prices, strict=True)]
        told = yield ToolCall.of("calculator", expression="+".join(terms))
        yield rng.choice(ANSWERS).format(told[-1]["content"])

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and is_same_answer(answer, str(self.task.answer)))}
