"""Programs as answers: the last code block, run in the sandbox against tests that it does not see."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from agentrl.types import THOUGHT_MARKS, strip_thoughts
from agentrl_envs.rewards.answers import Completion, Marks, get_text
from agentrl_envs.rewards.code_judge import CodeJudge, TestsError

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def _find_code_block(text: str) -> str | None:
    """Return the last block between fences of backquotes; ``None`` if there is none."""
    found = _BLOCK.findall(strip_thoughts(text))
    return found[-1] if found else None


class Code:
    """A reward: 1.0 where the last code block passes the row's column ``tests``; ``None`` without any.

    Tests are statements, such as ``assert f(2) == 4``, or pairs of arguments and result for the function named in
    the column ``function``: ``[[[2], 4], [[3], 9]]``. Neither is in the process that runs the answer: plain values
    cross, and are compared on the tests' side. ``None`` too where the tests could judge no answer.

    Args:
        partial: the share of the pairs that are right, instead of all or nothing.
        timeout_s: of all tests of an answer.
        sandbox: as of the tool ``python``.
    """

    __name__ = "code"
    per_episode = True

    def __init__(
        self,
        partial: bool = False,
        timeout_s: float = 5.0,
        sandbox: Literal["auto", "bubblewrap", "landlock"] = "auto",
        packages: Sequence[str] = (),
    ) -> None:
        self.partial, self.timeout_s, self.kind, self.packages = partial, timeout_s, sandbox, tuple(packages)
        self._judge: CodeJudge | None = None
        self._loop: Any = None

    async def __call__(
        self,
        completions: Sequence[Completion],
        tests: Sequence[Any],
        function: Sequence[str | None] | None = None,
        thought_marks: Marks = THOUGHT_MARKS,
        **_: Any,
    ) -> list[float | None]:
        names = function or [None] * len(completions)
        texts = [strip_thoughts(get_text(c), thought_marks) for c in completions]
        return [await self.score(text, t, n) for text, t, n in zip(texts, tests, names, strict=True)]

    async def score(self, text: str, tests: Any, function: str | None = None) -> float | None:
        """Score one answer. Raises InfraError if the sandbox fails, UserError if there is none."""
        if not tests:
            return None
        code = _find_code_block(text)
        if code is None:
            return 0.0
        judge = self._ready()
        try:
            if isinstance(tests, str) and function is None:
                return float(await judge.passes(code, tests))
            right = await judge.compare(code, str(function), _read_pairs(tests))
        except TestsError:
            return None
        return sum(right) / len(right) if self.partial else float(all(right))

    async def load(self) -> None:
        """Start the sandbox now, instead of with the first answer. Raises UserError where there is none."""
        await self._ready().start()

    def _ready(self) -> CodeJudge:
        """Return the judge, one an event loop."""
        loop = asyncio.get_running_loop()
        if self._judge is None or self._loop is not loop:
            self._loop, self._judge = loop, CodeJudge(self.kind, self.packages, self.timeout_s)
        return self._judge

    async def close(self) -> None:
        """End the sandbox."""
        judge, self._judge = self._judge, None
        if judge is not None and self._loop is asyncio.get_running_loop():
            await judge.close()


def _read_pairs(tests: Any) -> list[tuple[list[Any], Any]]:
    """Read pairs of arguments and result, from JSON or as they are. Raises TestsError for anything else."""
    try:
        pairs = json.loads(tests) if isinstance(tests, str) else tests
        return [(list(given), expected) for given, expected in pairs]
    except (ValueError, TypeError) as error:
        raise TestsError(f"the tests are no pairs of arguments and result: {error}") from None
