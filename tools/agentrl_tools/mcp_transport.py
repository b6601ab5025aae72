"""The transport to one MCP server: a process's pipes, or HTTP. It reports a loss, and the server's last words."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, Self

import anyio
import httpx2
import pydantic
from mcp import MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, JSONRPCMessage, jsonrpc_message_adapter

from agentrl.errors import UserError
from agentrl.settings.secret import Secret
from agentrl.types import to_utf8_json
from agentrl_tools.reaper import start_reaper

NOT_SENT = {"agentrl": "not sent"}  # the data of an error that the server cannot have caused
BROKEN = {"agentrl": "broken"}  # of an error that no server wrote: the connection broke
TAIL_BYTES = 2000
PLAIN = {"accept-encoding": "identity"}  # a few compressed bytes may be many
LONGEST_INTEGER = 1_000  # characters
MAX_MESSAGE = 8 << 20  # bytes of one message of a server's
# An idle connection is left before servers close theirs, after 5 s mostly: a call on its way would be lost.
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)


class Link:
    """One session's connection to its server. ``why``: what ended it."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.lost, self.doubted = asyncio.Event(), asyncio.Event()
        self.why = ""
        self.noise: str | None = None
        self.tail = _StderrTail()

    def lose(self, why: str) -> None:
        if not self.lost.is_set():
            self.why = why + self.describe_end()
            self.lost.set()

    def describe_end(self) -> str:
        """Return the end of a sentence: the server's last words."""
        noise = f"; on stdout it wrote {self.noise!r:.100}, which is no MCP message" if self.noise is not None else ""
        return noise + (f"; its last words:\n{last}" if (last := self.tail.text()) else "")

    def explain(self, error: BaseException) -> str:
        """Put an error during its start into words."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        match error:
            case FileNotFoundError() | PermissionError() | NotADirectoryError():
                return f"there is no command {shlex.split(self.server)[0]!r} that can be run"
            case MCPError(code=code) if code == CONNECTION_CLOSED and not is_url(self.server):
                return f"it ended{self.describe_end()}"
            case MCPError():
                return f"{error.message}{self.describe_end()}"
        return f"{type(error).__name__}: {error}{self.describe_end()}"


class _StderrTail:
    """The end of what a process writes to ``file``: a pipe that is read as it fills."""

    def __init__(self) -> None:
        self._end, write = os.pipe()
        os.set_blocking(self._end, False)
        self.file = os.fdopen(write, "w")
        self._bytes = b""
        asyncio.get_running_loop().add_reader(self._end, self._read)

    def _read(self) -> None:
        with suppress(OSError):  # there is nothing now
            self._bytes = (self._bytes + os.read(self._end, 65536))[-TAIL_BYTES:]

    def text(self) -> str:
        """Return the last lines, up to five."""
        self._read()
        return "\n".join(self._bytes.decode(errors="replace").strip().splitlines()[-5:])

    def close(self) -> None:
        self._read()
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)
        self.file.close()


def is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def parse_command(server: str, env: Sequence[str]) -> StdioServerParameters:
    """Parse a command line. Raises UserError if it is none, or an environment variable is missing."""
    try:
        words = shlex.split(server)
    except ValueError as error:
        raise UserError(f"tool 'mcp': cannot read the command {server!r}: {error}") from None
    if not words:
        raise UserError("tool 'mcp': the command is empty; say mcp:COMMAND ..., or mcp:URL")
    for name in env:
        if name not in os.environ:
            raise UserError(f"tool 'mcp': there is no environment variable {name!r}, which tool.mcp.env names")
    given = {name: os.environ[name] for name in env} | start_reaper()
    words[1:] = [Secret(word).reveal() for word in words[1:]]
    return StdioServerParameters(command=words[0], args=words[1:], env=given, encoding=BoundedLines.NAME)


@asynccontextmanager
async def open_transport(
    link: Link, parameters: StdioServerParameters | str, headers: Mapping[str, str]
) -> AsyncIterator[Any]:
    """Open the transport's two streams, as `mcp.Client` takes them."""
    async with _transport(link, parameters, headers) as (read, write):
        yield _MonitoredStream(read, link), write


@asynccontextmanager
async def _transport(
    link: Link, parameters: StdioServerParameters | str, headers: Mapping[str, str]
) -> AsyncIterator[Any]:
    if isinstance(parameters, StdioServerParameters):
        reading = _link.set(link)
        try:
            async with stdio_client(parameters, errlog=link.tail.file) as streams:
                yield streams
        finally:
            _link.reset(reading)
        return
    timeout = httpx2.Timeout(None, connect=10.0)  # a call has a deadline of its own
    async with (
        httpx2.AsyncClient(
            transport=_ContainedTransport(limits=LIMITS), timeout=timeout, headers={**headers, **PLAIN}
        ) as client,
        streamable_http_client(parameters, http_client=client) as streams,
    ):
        yield streams


_link: ContextVar[Link] = ContextVar("agentrl_mcp_link")  # of the process that is being started


class BoundedLines(codecs.getincrementaldecoder("utf-8")):  # type: ignore[misc]
    """UTF-8 whose lines are bounded, for ``mcp`` to read a process by: its text encoding can be chosen, its reader not.

    A line that does not end would fill the memory, and a long one would be parsed in the event loop.
    """

    NAME = "agentrl-bounded-lines"

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._line = 0  # characters so far
        self._of = _link.get(None)

    def decode(self, data: Any, final: bool = False) -> str:
        text: str = super().decode(data, final)
        first, *rest = text.split("\n")
        longest = max(self._line + len(first), *map(len, rest), 0)
        self._line = len(rest[-1]) if rest else self._line + len(first)
        if longest > MAX_MESSAGE:
            why = f"it wrote a message of over {MAX_MESSAGE >> 20} MiB"
            if self._of is not None:
                self._of.lose(why)
            raise ConnectionError(why)
        return text

    @classmethod
    def find(cls, name: str) -> codecs.CodecInfo | None:
        """Return the codec, where it is asked for."""
        if name.replace("_", "-") != cls.NAME:
            return None
        plain = codecs.lookup("utf-8")
        return codecs.CodecInfo(plain.encode, plain.decode, incrementaldecoder=cls, name=cls.NAME)


codecs.register(BoundedLines.find)


def _mend_message(line: str) -> JSONRPCMessage | None:
    """Read a message that holds half a character or a huge number, as servers write them whose JSON is lax.

    They answer well otherwise: to leave such a server would lose the calls of all others for what one of them asked.
    """
    try:
        message = json.loads(line, parse_int=_read_integer)
        return jsonrpc_message_adapter.validate_python(to_utf8_json(message), by_name=False)
    except (ValueError, RecursionError):  # no JSON, or no message
        return None


def _read_integer(digits: str) -> int | None:
    return int(digits) if len(digits) < LONGEST_INTEGER else None


class _MonitoredStream:
    """A read stream that tells its link when it ends, and of what was no message."""

    def __init__(self, stream: Any, link: Link) -> None:
        self._stream, self._link = stream, link

    async def receive(self) -> SessionMessage | Exception:
        try:
            item: SessionMessage | Exception = await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._link.lose("it ended")
            raise
        if isinstance(item, pydantic.ValidationError):
            line = str(item.errors()[0].get("input"))
            if (mended := _mend_message(line)) is not None:
                return SessionMessage(mended)
            self._link.noise = line
            if line.startswith("{") and '"jsonrpc"' in line[:100]:  # somebody waits for it
                self._link.lose("it wrote a message that cannot be read")
        return item

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


class _ContainedTransport(httpx2.AsyncHTTPTransport):
    """A connection that fails is an answer to the request it carried; raised, it would end all others of the client."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                return _failed(request, "it answers compressed, which was not asked for")
            response.stream = _BoundedStream(response.stream)
            if response.headers.get("content-type", "").startswith("application/json"):
                await response.aread()
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            return _failed(request, f"nothing answers at {request.url}: {error}", NOT_SENT)
        except httpx2.TransportError as error:
            return _failed(request, f"the connection broke: {error or type(error).__name__}")
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    """A response's bytes, up to ``MAX_MESSAGE`` between two empty lines, which end an event."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        message = 0
        async for chunk in self._stream:
            end = max(chunk.rfind(b"\n\n"), chunk.rfind(b"\r\n\r\n"))
            message = message + len(chunk) if end < 0 else len(chunk) - end
            if message > MAX_MESSAGE:
                raise httpx2.ReadError(f"it answered with a message of over {MAX_MESSAGE >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _failed(request: httpx2.Request, message: str, data: Mapping[str, str] = BROKEN) -> httpx2.Response:
    error = {"code": CONNECTION_CLOSED, "message": message, "data": data}
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)
