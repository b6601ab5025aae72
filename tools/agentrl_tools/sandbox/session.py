"""A session: one Python of a sandbox, whose variables and files last from call to call."""

from __future__ import annotations

import asyncio
import base64
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self

from agentrl import InfraError, ToolError

if TYPE_CHECKING:
    from agentrl_tools.sandbox.fork_server_client import CodeResult

FILE_BYTES = 16 << 20
_PART = 32 << 10
_numbers = count()


class _Server(Protocol):
    """Server of code: a `ForkServerClient`, or a `MontyPool`."""

    generation: int

    async def run(self, code: str, *, session: str | None, timeout_s: float, old: int | None = None) -> CodeResult: ...
    async def end(self, session: str) -> None: ...


class Session:
    """One Python of a sandbox. It begins with its first call, and ends with `close`, or with a call that breaks it.

    Attributes:
        files: its files.
        is_alive: it has variables and files of earlier calls.
    """

    def __init__(self, server: _Server) -> None:
        self.server, self.name = server, f"session-{next(_numbers)}"
        self.files = SessionFiles(self)
        self.is_alive = False
        self._generation = 0  # of the server that has the variables
        self._turn = asyncio.Lock()

    async def run(self, code: str, timeout_s: float = 5.0) -> CodeResult:
        """Run code after what ran before. After a result but ``ok`` and ``raised`` the session begins anew.

        Raises:
            InfraError: the sandbox was started again meanwhile, and the variables are lost; or it is gone.
        """
        async with self._turn:
            old = self._generation if self.is_alive else None
            result = await self.server.run(code, session=self.name, timeout_s=timeout_s, old=old)
            if result.status == "lost":
                raise InfraError("sandbox_gone", "the sandbox was started again, and the episode's variables are lost")
            self.is_alive, self._generation = result.status in ("ok", "raised"), self.server.generation
            return result

    async def close(self) -> None:
        """End the process, and with it its variables and files."""
        if self.is_alive:
            self.is_alive = False
            await self.server.end(self.name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SessionFiles:
    """The files of a session; paths are relative to its home."""

    def __init__(self, session: Session) -> None:
        self.session = session

    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file, and make its folders. Raises ToolError if it cannot be written."""
        content = data.encode() if isinstance(data, str) else data
        if len(content) > FILE_BYTES:
            raise ToolError(f"{path!r} would have {len(content)} bytes; {FILE_BYTES} are the most")
        text = base64.b64encode(content).decode()
        await self._run(
            f"__import__('os').makedirs(__import__('os').path.dirname({path!r}) or '.', exist_ok=True)\n"
            f"__import__('pathlib').Path({path!r}).write_bytes(__import__('base64').b64decode('{text}'))"
        )

    async def read(self, path: str) -> bytes:
        """Read a file. Raises ToolError if it cannot be read."""
        content = b""
        while len(content) % _PART == 0:  # as much as one answer holds
            output = await self._run(
                f"with open({path!r}, 'rb') as _file:\n"
                f"    _file.seek({len(content)})\n"
                f"    print(__import__('base64').b64encode(_file.read({_PART})).decode())\n"
                "del _file"
            )
            try:
                part = base64.b64decode(output)
            except ValueError:
                raise ToolError(f"{path!r} cannot be read: the session prints other things beside it") from None
            if not part or len(content) > FILE_BYTES:
                break
            content += part
        return content

    async def _run(self, code: str) -> str:
        result = await self.session.run(code, timeout_s=30.0)
        if result.status != "ok" or result.cut:
            lines = result.output.strip().splitlines() or [result.status]
            raise ToolError(lines[-1])
        return result.output
