"""A command that plays an episode: a process for each, told by its environment where the policy is and what to do.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY    the policy
    AGENTRL_TASK                                                              a JSON file of messages and tools
    AGENTRL_MCP_URL                                                           the environment's tools, by MCP

Its exit ends the episode. A status other than 0 is the agent's error, a signal the world's fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import anyio
from anyio.abc import ByteReceiveStream, Process

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.runtime.threads import open_task_group

_TAIL = 4000  # characters of its stderr that are kept


class ProcessAgent:
    """An agent that is a command."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._folder = ""  # of the tasks' files
        self._count = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        with tempfile.TemporaryDirectory(prefix="agentrl-agent-") as self._folder:
            yield self

    async def run(self, task: AgentTask) -> AgentEnding:
        self._count += 1
        file = Path(self._folder, f"task-{self._count}.json")
        given = {"messages": list(task.messages), "tools": list(task.tools)}
        await anyio.Path(file).write_text(json.dumps(given), encoding="utf-8")
        try:
            async with self.start(task, str(file), _build_environment(task)) as process:
                status, tail = await _wait(process)
        except OSError as error:
            return AgentEnding(f"{self.words[0]} cannot be started: {error.strerror}", str(error), killed=True)
        finally:
            await anyio.Path(file).unlink(missing_ok=True)
        return self.describe(status, tail)

    @asynccontextmanager
    async def start(self, task: AgentTask, file: str, environment: Mapping[str, str]) -> AsyncIterator[Process]:
        """Start the command; leaving the block ends it, and all that it started.

        Args:
            file: of the task.
        """
        process = await anyio.open_process(
            self.words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment, "AGENTRL_TASK": file},
            start_new_session=True,
        )
        async with self.ending(process):
            yield process

    @asynccontextmanager
    async def ending(self, process: Process) -> AsyncIterator[None]:
        """End a process, and all that it started, when the block ends."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                _kill_all(process)
                await process.wait()
                await process.aclose()

    def describe(self, status: int, tail: str) -> AgentEnding:
        """Describe how the command ended."""
        return describe_status(status, tail)


async def _wait(process: Process) -> tuple[int, str]:
    """Wait for a command; return its status, and the end of what it said on stderr."""
    assert process.stderr is not None
    tail = _Tail()
    async with open_task_group() as tasks:
        tasks.start_soon(tail.read, process.stderr)
        status = await process.wait()
        _kill_all(process)  # who is left of them may hold stderr open
    return status, str(tail)


def describe_status(status: int, tail: str) -> AgentEnding:
    """Describe how a process ended, by its status and the end of what it said."""
    if status == 0:
        return AgentEnding()
    if status < 0:
        return AgentEnding(f"it was ended by {signal.Signals(-status).name}", tail, killed=True)
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
    return AgentEnding(f"exit status {status}" + (f": {last[:200]}" if last else ""), tail)


def _build_environment(task: AgentTask) -> dict[str, str]:
    """Build the variables by which clients of the model's makers find the policy."""
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        **({"AGENTRL_MCP_URL": task.mcp_url} if task.mcp_url else {}),
    }


class _Tail:
    """The end of what a process says."""

    def __init__(self) -> None:
        self._kept = b""

    async def read(self, stream: ByteReceiveStream) -> None:
        """Read a stream to its end."""
        async for part in stream:
            self._kept = (self._kept + part)[-4 * _TAIL :]

    def __str__(self) -> str:
        return self._kept.decode(errors="replace")[-_TAIL:]


def _kill_all(process: Process) -> None:
    """Kill a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
