"""code: write a function; hidden tests decide, in the sandbox. Python may be tried out before."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from anyio import to_thread

from agentrl import Message, ToolCall, ToolEnv, Trajectory, UserError
from agentrl.errors import NoExpertError
from agentrl.types import ExpertTurn, Observation
from agentrl_envs import code_tasks, dataset
from agentrl_envs.rewards import Code

COLUMNS = ("prompt", "tests")
TRIED = 0.4  # of the expert's functions are tried out first


@dataclass(frozen=True)
class _CodeShared:
    """The sandbox, and the rows where there are any."""

    judge: Code
    rows: Any


class WriteCode(ToolEnv):
    """Write a small function. The reward: all hidden tests pass. The share that does is logged beside it.

    Args:
        data: rows of one's own instead, as for ``prompts``, with ``prompt`` and ``tests``: statements such as
            ``assert``, or ``[[arguments, result], ...]`` with the name in ``function``.
        timeout_s: of all tests of an answer.
        tool: whether Python may be tried out before.
    """

    system_prompt = code_tasks.SYSTEM_PROMPT
    max_turns = 4
    reward_weights = {"passed": 0.0}

    def __init__(self, data: Any = None, timeout_s: float = 5.0, tool: bool = True) -> None:
        super().__init__()
        self.tools = ("python",) if tool else ()

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[_CodeShared]:
        rows = None
        if settings.get("data") is not None:
            rows = await to_thread.run_sync(dataset.load_rows, settings["data"], "train")
            if not len(rows) or any(c not in rows[0] for c in COLUMNS):
                raise UserError(
                    f"env.data of env 'code' has rows with {' and '.join(COLUMNS)}; {settings['data']!r} has not"
                )
        judge = Code(partial=True, timeout_s=settings.get("timeout_s", 5.0))
        try:
            yield _CodeShared(judge, rows)
        finally:
            await judge.close()

    def count(self, split: str) -> int | None:
        return None if self.shared.rows is None else len(self._rows(split))

    def _rows(self, split: str) -> range:
        """Return the rows of a split; the last tenth is held out."""
        whole = len(self.shared.rows)
        held = max(1, whole // 10)
        return range(whole - held, whole) if split == "test" else range(max(1, whole - held))

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        if self.shared.rows is None:
            self.task = task = code_tasks.draw(seed, split=split)
            self.tests, self.function = [list(t) for t in task.tests], task.function
            return self.ask(task.question), {"family": task.family}
        places = self._rows(split)
        row = self.shared.rows[places[seed % len(places)]]
        self.tests, self.function = row["tests"], row.get("function")
        return self.ask(row["prompt"]), {}

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Write the function, at once or after trying out the question's examples.

        Of rows of one's own nobody knows the solution.
        """
        if self.shared.rows is not None:
            raise NoExpertError("the expert of env 'code' knows the solutions of its own tasks, and not of env.data")
        if self.tools and random.Random(self.task.question).random() < TRIED:
            examples = [line.partition(" is ")[0] for line in self.task.question.splitlines()[1:]]
            tried = "".join(f"print({example})\n" for example in examples)
            yield ToolCall.of("python", code=f"{self.task.solution}{tried}")
        yield f"```python\n{self.task.solution}```"

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        tests = self.tests if not isinstance(self.tests, str) else _pairs(self.tests)
        passed = await self.shared.judge.score(trajectory.answer, tests, self.function)
        return {"correct": None if passed is None else float(passed == 1.0), "passed": passed}


def _pairs(tests: str) -> Any:
    """Parse tests as JSON pairs; return statements as they are."""
    try:
        return json.loads(tests)
    except ValueError:
        return tests
