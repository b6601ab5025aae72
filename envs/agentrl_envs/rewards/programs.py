"""Programs as answers: the last code block, run in the sandbox against tests that it does not see."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal

from agentrl_tools.sandbox import fork_server_client, launch

from agentrl.types import THOUGHT_MARKS, strip_thoughts
from agentrl_envs.rewards.answers import Completion, Marks, get_text

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def _find_code_block(text: str) -> str | None:
    """Return the last block between fences of backquotes; ``None`` if there is none."""
    found = _BLOCK.findall(strip_thoughts(text))
    return found[-1] if found else None


async def _collect_outputs(
    sandbox: fork_server_client.ForkServerClient,
    code: str,
    function: str,
    inputs: Sequence[Sequence[Any]],
    timeout_s: float,
) -> list[Any]:
    """Collect a function's result for each input, as JSON has it; ``...`` where nothing came.

    What is expected is not in the sandbox: code that would like to cheat does not find it there.
    """
    mark = secrets.token_hex(8)
    calls = (
        f"\nimport json as _json\nfor _i, _given in enumerate(_json.loads({json.dumps(json.dumps(list(inputs)))})):\n"
        f"    try: _said = _json.dumps({function}(*_given))\n"
        f"    except BaseException: continue\n"
        f"    print('\\n{mark}', _i, _said, flush=True)\n"
    )
    found = await sandbox.run(code + calls, session=None, timeout_s=timeout_s)
    answers: list[Any] = [...] * len(inputs)
    for line in found.output.splitlines():
        parts = line.split(" ", 2)
        if parts[0] == mark and len(parts) == 3 and parts[1].isdigit() and int(parts[1]) < len(answers):
            answers[int(parts[1])] = _read(parts[2])
    return answers


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ...


async def _passes_tests(sandbox: fork_server_client.ForkServerClient, code: str, tests: str, timeout_s: float) -> bool:
    """Return True if the code, and then the tests, run to their end. For tests that are statements, as ``assert``."""
    mark = secrets.token_hex(16)
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    found = await sandbox.run(f"{code}\n{tests}\nprint('\\n{mark}')", session=None, timeout_s=timeout_s)
    return found.status == "ok" and mark in found.output.split()


class Code:
    """A reward: 1.0 where the last code block passes the row's column ``tests``; ``None`` without any.

    Tests are statements, such as ``assert f(2) == 4``, or pairs of arguments and result for the function named in
    the column ``function``: ``[[[2], 4], [[3], 9]]``. Only those cannot be cheated from inside.

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
        self._held: AsyncExitStack | None = None
        self._sandbox: fork_server_client.ForkServerClient | None = None
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
        sandbox = await self._ready()
        if isinstance(tests, str) and function is None:
            return float(await _passes_tests(sandbox, code, tests, self.timeout_s))
        pairs = json.loads(tests) if isinstance(tests, str) else tests
        said = await _collect_outputs(sandbox, code, str(function), [p[0] for p in pairs], self.timeout_s)
        right = [
            s is not ... and s == p[1] and isinstance(s, bool) == isinstance(p[1], bool)
            for s, p in zip(said, pairs, strict=True)
        ]
        return sum(right) / len(right) if self.partial else float(all(right))

    async def load(self) -> None:
        """Start the sandbox now, instead of with the first answer. Raises UserError where there is none."""
        await self._ready()

    async def _ready(self) -> fork_server_client.ForkServerClient:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._held, self._sandbox, self._opening = loop, None, None, asyncio.Lock()
        async with self._opening:
            if self._sandbox is None:
                self._held = AsyncExitStack()
                start = launch.choose_launch(self.kind, launch.SandboxLimits(), self.packages)
                self._sandbox = await self._held.enter_async_context(fork_server_client.open_fork_server(start))
        return self._sandbox

    async def close(self) -> None:
        """End the sandbox."""
        held, self._held, self._sandbox = self._held, None, None
        if held is not None and self._loop is asyncio.get_running_loop():
            await held.aclose()
