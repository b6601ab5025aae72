"""A machine of its own for an episode: a shell, files, processes, no network; bubblewrap around all of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from agentrl import InfraError, ToolError, UserError
from agentrl_tools.sandbox.fork_server_client import GRACE_S, START_S
from agentrl_tools.sandbox.launch import Launch
from agentrl_tools.sandbox.process import end_process, kill_and_read_stderr, start_process


@dataclass(frozen=True)
class ShellResult:
    """The end of a command; ``exit_code`` is ``None`` if it took too long."""

    exit_code: int | None
    stdout: str
    stderr: str
    cut: int = 0


class EpisodeVm:
    """Started at its first use, and gone with ``close``. One thing at a time."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.process: asyncio.subprocess.Process | None = None
        self.turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the machine. Raises UserError if it does not start here."""
        if self.process is not None:
            return
        self.process = await start_process(self.launch, {}, limit=1 << 24)
        answer = await self._exchange(dict(self.launch.settings), START_S)
        if answer != {"ready": True}:
            words = await kill_and_read_stderr(self.process)
            await self.close()
            raise UserError(f"the machine of an episode does not start: {words or answer}")

    async def exec(self, command: str, timeout_s: float) -> ShellResult:
        """Run it by ``sh``, in its home.

        Raises:
            ToolError: it ended the machine; InfraError: that did not answer.
        """
        answer = await self._ask({"op": "exec", "command": command, "timeout_s": timeout_s}, timeout_s)
        out, err = (base64.b64decode(answer[k]).decode(errors="replace") for k in ("stdout", "stderr"))
        return ShellResult(answer["exit_code"], out, err, answer["cut"])

    async def read(self, path: str) -> bytes:
        """Read the first megabyte of a file. Raises ToolError if it cannot be read."""
        return base64.b64decode((await self._ask({"op": "read", "path": path}))["data"])

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and make its folders. Raises ToolError if it cannot be written."""
        await self._ask({"op": "write", "path": path, "data": base64.b64encode(data).decode()})

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await end_process(process)

    async def _ask(self, request: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        async with self.turn:
            await self.start()
            try:
                answer = await self._exchange(request, timeout_s + GRACE_S)
            except BaseException:
                await self.close()  # what it says later is no answer to the next
                raise
        if answer is None:
            await self.close()
            raise ToolError("that ended the machine: its files and processes are gone")
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer

    async def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Send a request and return the answer; ``None`` if the process has ended."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise InfraError("sandbox_gone", f"an episode's machine did not answer in {timeout_s:g} s") from None
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer
