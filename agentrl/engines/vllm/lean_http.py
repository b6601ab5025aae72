"""A lean HTTP/1.1 client for the one request that is made each turn: its body has the whole context.

A general client costs more than all the rest of a turn. This one keeps connections open, writes the head and the
body in one go, and reads an answer of known length or in chunks. No torch here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
CONNECT_S = 20.0
_BUFFER = 4 << 20
_MOST = 1 << 30  # bytes of an answer


class HttpLost(Exception):
    """The server is gone, or answers what is no HTTP."""


class GivenUp(Exception):
    """The server was taken for lost before it had answered."""


async def await_while_up(call: Awaitable[T], lost: asyncio.Future[Any]) -> T:
    """Await a server's answer. Raises GivenUp as soon as ``lost`` is set."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # marks it as read
    try:
        await asyncio.wait({task, lost}, return_when="FIRST_COMPLETED")
        if not task.done():
            raise GivenUp
        return task.result()
    finally:
        task.cancel()  # the server aborts the request when the connection closes


class LeanHttp:
    """Connections to one server, each for one request at a time.

    Args:
        url: of the server; a path in it goes before that of the request.
        path: of the request.
    """

    def __init__(self, url: str, path: str) -> None:
        parts = urlsplit(url)
        self._host, self._ssl = parts.hostname or "", ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        host = parts.netloc.rpartition("@")[2]
        self._line = f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {host}\r\n".encode()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._closed = False

    async def post(self, body: bytes, key: str = "") -> tuple[int, bytes]:
        """Send a body of JSON; return the status and the body of the answer. A cancelled call closes its connection.

        Raises:
            HttpLost: the server is gone.
        """
        bearer = b"Authorization: Bearer %b\r\n" % key.encode() if key else b""
        head = b"%b%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (self._line, bearer, len(body))
        while self._idle:  # one that the server has closed meanwhile gives no answer at all
            with suppress(_Unanswered):
                return await self._ask(self._idle.pop(), head, body)
        try:
            return await self._ask(await self._connect(), head, body)
        except _Unanswered as error:
            raise HttpLost(str(error)) from None

    async def close(self) -> None:
        """Close the connections that nobody uses; each other one once its request has ended."""
        self._closed = True
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            opening = asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=_BUFFER)
            return await asyncio.wait_for(opening, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise HttpLost(type(error).__name__) from None

    async def _ask(
        self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], head: bytes, body: bytes
    ) -> tuple[int, bytes]:
        reader, writer = connection
        kept = False
        try:
            writer.writelines((head, body))
            try:
                answer = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                raise (HttpLost("closed the connection") if error.partial else _Unanswered("no answer")) from None
            except ConnectionError as error:
                raise _Unanswered(type(error).__name__) from None
            status, content, kept = await _read_answer(reader, answer)
            return status, content
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise HttpLost(type(error).__name__) from None
        finally:
            if kept and not self._closed:
                self._idle.append(connection)
            else:
                writer.close()


class _Unanswered(Exception):
    """A connection was closed before a byte of an answer."""


async def _read_answer(reader: asyncio.StreamReader, head: bytes) -> tuple[int, bytes, bool]:
    """Read what stands behind the head of an answer: the status, the body, whether the connection stays open."""
    status, low = int(head[9:12]), head.lower()
    at = low.find(b"\r\ncontent-length:")
    if at >= 0:
        length = int(low[at + 17 : low.index(b"\r\n", at + 2)])
        if length > _MOST:
            raise ValueError("too long an answer")
        content = await reader.readexactly(length)
    elif b"\r\ntransfer-encoding: chunked" in low:
        content = await _read_chunks(reader)
    else:
        return status, await reader.read(_MOST), False
    return status, content, b"\r\nconnection: close" not in low


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # headers behind the body
    return b"".join(parts)
