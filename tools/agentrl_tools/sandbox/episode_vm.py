"""A machine of its own for an episode: a shell, files, processes, no network; bubblewrap around all of it."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from typing import Any

from agentrl import InfraError, ToolError, UserError
from agentrl_tools.sandbox.fork_server_client import GRACE_S, START_S
from agentrl_tools.sandbox.launch import Launch
from agentrl_tools.sandbox.machine_users import machine_users
from agentrl_tools.sandbox.process import end_process, kill_and_read_stderr, start_process
from agentrl_tools.sandbox.users import is_root

MAX_COMMAND = 100_000  # bytes; Linux takes 131,071 in an argument
GONE = "its files and processes are gone, and there is a new one"


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
        self.user: int | None = None
        self.turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the machine. Raises UserError if it does not start here."""
        if self.process is not None:
            return
        self.user = machine_users.take() if is_root(self.launch.user) else None
        try:
            self.process = await start_process(self.launch, {}, limit=1 << 24)
            answer = await self._exchange({**self.launch.settings, "user": self.user}, START_S)
            if answer != {"ready": True}:
                words = await kill_and_read_stderr(self.process)
                raise UserError(f"the machine of an episode does not start: {words or answer}")
        except BaseException:
            await self.close()
            raise

    async def exec(self, command: str, timeout_s: float) -> ShellResult:
        """Run it by ``sh``, in its home. What it leaves running is paused until the next request.

        Raises:
            ToolError: it ended the machine, or held it up; InfraError: no machine can be had.
        """
        if (size := len(_encode("a command", command))) > MAX_COMMAND:
            raise ToolError(f"the command has {size} bytes; {MAX_COMMAND} are the most: write a file and run that")
        answer = await self._ask({"op": "exec", "command": command, "timeout_s": timeout_s}, timeout_s)
        out, err = (base64.b64decode(answer[k]).decode(errors="replace") for k in ("stdout", "stderr"))
        return ShellResult(answer["exit_code"], out, err, answer["cut"])

    async def read(self, path: str) -> bytes:
        """Read the first megabyte of a file. Raises ToolError if it cannot be read."""
        _encode("a path", path)
        return base64.b64decode((await self._ask({"op": "read", "path": path}))["data"])

    async def write(self, path: str, data: bytes) -> None:
        """Write a file and make its folders. Raises ToolError if it cannot be written."""
        _encode("a path", path)
        await self._ask({"op": "write", "path": path, "data": base64.b64encode(data).decode()})

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await end_process(process)
        user, self.user = self.user, None
        if user is not None:
            machine_users.give_back(user)

    async def _ask(self, request: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        async with self.turn:
            await self._restart()
            try:
                answer = await self._exchange(request, timeout_s + GRACE_S)
            except TimeoutError:
                await self.close()
                await self._restart()  # where this fails too, it is not the model's doing
                raise ToolError(f"that held up the machine: {GONE}") from None
            except BaseException:
                await self.close()  # what it says later is no answer to the next
                raise
            if answer is None:
                await self.close()
                raise ToolError(f"that ended the machine: {GONE}")
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer

    async def _restart(self) -> None:
        """Start the machine, which could be started before. Raises InfraError if it cannot."""
        try:
            await self.start()
        except (UserError, TimeoutError, OSError) as error:
            raise InfraError("sandbox_gone", f"an episode's machine does not start: {error}") from None

    async def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Send a request and return the answer; ``None`` if the process has ended. Raises TimeoutError."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(timeout_s):
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
            except ConnectionError:
                return None
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer


def _encode(name: str, text: str) -> bytes:
    """Encode what the model wrote. Raises ToolError for what no file's name and no command can hold."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise ToolError(f"{name} cannot hold half of a character (a lone surrogate): {text!a}") from None
    if b"\0" in encoded:
        raise ToolError(f"{name} cannot hold the character NUL: {text!r}")
    return encoded
