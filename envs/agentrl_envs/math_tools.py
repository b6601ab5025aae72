"""math-tools: arithmetic too large for the head, a calculator, and an exact check of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentrl import ContractError, ToolEnv, Trajectory
from agentrl.types import Observation
from agentrl_envs import math_tasks
from agentrl_envs.rewards import extract_boxed, is_same_answer


class MathTools(ToolEnv):
    r"""Expressions, nested ones, word problems and step-by-step instructions; the answer goes in ``\boxed{}``.

    Args:
        level: how difficult the tasks may be, 1 to 4.
        families: which kinds of task, of ``expression``, ``nested``, ``word`` and ``steps``; all by default.
        tool: what computes: ``calculator``, or ``python``, code in a sandbox.
    """

    system_prompt = math_tasks.SYSTEM_PROMPT
    tools: Sequence[Any] = ("calculator",)
    max_turns = 5

    def __init__(
        self,
        level: int = 3,
        families: Sequence[str] | None = None,
        tool: Literal["calculator", "python"] = "calculator",
    ) -> None:
        super().__init__()
        self.level, self.families = level, families
        if tool != "calculator":
            self.tools = (tool,)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        try:
            self.task = math_tasks.draw(seed, split=split, level=self.level, families=self.families)
        except ValueError as error:
            raise ContractError(f"env 'math-tools': {error}") from None
        return self.ask(self.task.question), {"family": self.task.family, "expected": str(self.task.answer)}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and is_same_answer(answer, str(self.task.answer)))}
