"""A machine of its own for an episode: a shell, files, processes, no network; bubblewrap around all of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from agentrl import ToolError, UserError, WorldFault
from agentrl_tools.sandbox.client import GRACE_S, START_S
from agentrl_tools.sandbox.launch import Launch
from agentrl_tools.sandbox.process import ended, last_words, started


@dataclass(frozen=True)
class Ran:
    """How a command ended; ``exit_code`` is ``None`` where it took too long."""

    exit_code: int | None
    stdout: str
    stderr: str
    cut: int = 0


class Machine:
    """Started at its first use, and gone with ``close``. One thing at a time."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.process: asyncio.subprocess.Process | None = None
        self.turn = asyncio.Lock()

    async def start(self) -> None:
        """Raises UserError where it cannot be had here."""
        if self.process is not None:
            return
        self.process = await started(self.launch, {}, limit=1 << 24)
        answer = await self._said(dict(self.launch.settings), START_S)
        if answer != {"ready": True}:
            words = await last_words(self.process)
            await self.close()
            raise UserError(f"the machine of an episode does not start: {words or answer}")

    async def exec(self, command: str, timeout_s: float) -> Ran:
        """Run it by ``sh``, in its home.

        Raises:
            ToolError: it ended the machine; WorldFault: that did not answer.
        """
        found = await self._asked({"op": "exec", "command": command, "timeout_s": timeout_s}, timeout_s)
        out, err = (base64.b64decode(found[k]).decode(errors="replace") for k in ("stdout", "stderr"))
        return Ran(found["exit_code"], out, err, found["cut"])

    async def read(self, path: str) -> bytes:
        """The first megabyte of a file. Raises ToolError where it cannot be read."""
        return base64.b64decode((await self._asked({"op": "read", "path": path}))["data"])

    async def write(self, path: str, data: bytes) -> None:
        """Folders on the way are made. Raises ToolError where it cannot be written."""
        await self._asked({"op": "write", "path": path, "data": base64.b64encode(data).decode()})

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await ended(process)

    async def _asked(self, request: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        async with self.turn:
            await self.start()
            try:
                answer = await self._said(request, timeout_s + GRACE_S)
            except BaseException:
                await self.close()  # what it says later is no answer to the next
                raise
        if answer is None:
            await self.close()
            raise ToolError("that ended the machine: its files and processes are gone")
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer

    async def _said(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """The answer; ``None`` where there is nobody any more."""
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
            raise WorldFault("sandbox_gone", f"an episode's machine did not answer in {timeout_s:g} s") from None
        found: dict[str, Any] | None = json.loads(line) if line else None
        return found
