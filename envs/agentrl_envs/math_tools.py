"""math-tools: arithmetic too large for the head, a calculator, and an exact check of the answer."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal

from agentrl import ContractError, Message, ToolCall, ToolEnv, Trajectory
from agentrl.types import ExpertTurn, Observation
from agentrl_envs import math_tasks
from agentrl_envs.rewards import extract_boxed, is_same_answer

IN_TWO = 0.3  # of the expert's episodes compute a part first
ANSWERS = ("The answer is \\boxed{{{}}}.", "\\boxed{{{}}}", "So the result is \\boxed{{{}}}.")


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

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Compute all at once, or a part first and then the rest with its result; answer what the tool said."""
        rng = random.Random(self.task.question)
        expression = self.task.expression
        part = math_tasks.draw_part(rng, expression) if rng.random() < IN_TWO else None
        if part is not None:
            told = yield self._compute(part.text)
            expression = part.put(told[-1]["content"])
        told = yield self._compute(expression)
        yield rng.choice(ANSWERS).format(told[-1]["content"])

    def _compute(self, expression: str) -> ToolCall:
        if self.tools[0] == "calculator":
            return ToolCall.of("calculator", expression=expression)
        return ToolCall.of("python", code=f"print({expression.replace('/', '//')})")  # each division is exact

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and is_same_answer(answer, str(self.task.answer)))}
