"""A command that plays an episode: a process for each, told by its environment where the policy is and what to do.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY    the policy
    AGENTRL_TASK                                                              a JSON file of messages and tools
    AGENTRL_MCP_URL                                                           the environment's tools, by MCP

Where the environment gives files, it works in a folder of its own with them. Its exit ends the episode. A status other
than 0 is the agent's error, a signal the world's fault.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import anyio
from anyio.abc import ByteReceiveStream, Process

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.orphan_watch import OrphanWatch
from agentrl.agents.proxies import exempt_loopback
from agentrl.runtime.threads import open_task_group, run_in_thread

_TAIL = 4000  # characters of its stderr that are kept


class ProcessAgent:
    """An agent that is a command."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._folder = ""  # of the tasks' files
        self._count = 0
        self._orphans: OrphanWatch | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        with tempfile.TemporaryDirectory(prefix="agentrl-agent-") as self._folder:
            self._orphans = OrphanWatch()
            try:
                yield self
            finally:
                self._orphans.close()
                self._orphans = None

    async def run(self, task: AgentTask) -> AgentEnding:
        self._count += 1
        file, folder, keeps = Path(self._folder, f"task-{self._count}.json"), "", False
        work = Path(self._folder, f"work-{self._count}")
        given = {"messages": list(task.messages), "tools": list(task.tools), **task.files_to_json()}
        await anyio.Path(file).write_text(json.dumps(given), encoding="utf-8")
        try:
            if task.files is not None:
                folder = str(work)
                await run_in_thread(partial(_lay_out, work, task.files))
            async with self.start(task, str(file), _build_environment(task), folder) as process:
                status, tail = await _wait(process)
            keeps = True
        except OSError as error:
            return AgentEnding(f"{self.words[0]} cannot be started: {error.strerror}", str(error), killed=True)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.Path(file).unlink(missing_ok=True)
                if folder and not keeps:
                    await run_in_thread(partial(shutil.rmtree, folder, ignore_errors=True))
        return replace(self.describe(status, tail), folder=folder)

    @asynccontextmanager
    async def start(
        self, task: AgentTask, file: str, environment: Mapping[str, str], folder: str
    ) -> AsyncIterator[Process]:
        """Start the command; leaving the block ends it, and all that it started.

        Args:
            file: of the task.
            folder: that it works in; empty: that of the run.
        """
        process = await anyio.open_process(
            name_files(self.words) if folder else self.words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder or None,
            env={**os.environ, **exempt_loopback(), **environment, "AGENTRL_TASK": file},
            start_new_session=True,
        )
        async with self.ending(process):
            yield process

    @asynccontextmanager
    async def ending(self, process: Process) -> AsyncIterator[None]:
        """End a process, and all that it started, when the block ends, or this process is killed."""
        with self._orphans.watch(process.pid) if self._orphans is not None else nullcontext():
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


def name_files(words: Sequence[str]) -> list[str]:
    """Return the words of a command with files by their whole path, for a process that works in another folder."""
    program = words[0] if os.sep not in words[0] else str(Path(words[0]).absolute())
    return [program, *(str(Path(w).absolute()) if os.path.exists(w) else w for w in words[1:])]


def _lay_out(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a task into a folder."""
    folder.mkdir()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


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
        **task.variables,
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
