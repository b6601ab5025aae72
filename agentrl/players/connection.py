"""The connection between a player and its controller: an HTTP upgrade that shows a key, and then frames.

    GET /player HTTP/1.1                                   through http and https, and a proxy that ends TLS
    Authorization: Bearer KEY
    Upgrade: agentrl-player

A frame is two lengths of four bytes, a header in JSON, and bytes that the header describes. Reading one runs nothing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import ssl
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import SplitResult

import anyio

from agentrl.errors import UserError
from agentrl.runtime.addresses import split_address

Fields = dict[str, Any]  # of a header, as JSON has them
Shown = Mapping[str, Any]  # the same, to be read alone
KEY_ENV = "AGENTRL_PLAYER_KEY"  # the variable with the key that a player shows
UPGRADE, PATH = "agentrl-player", "/player"
MOST_HEADER, MOST_BODY = 64 << 20, 2 << 30  # bytes of a frame
_HEAD, _LONGEST_HEAD, _OPENING_S = struct.Struct("<II"), 16 << 10, 20.0
_BUFFER = 4 << 20  # bytes that are read ahead
_CHUNK = 1 << 20  # bytes that are taken at once


class ConnectionEnded(Exception):
    """The other side is gone, or speaks another language; the text says which."""


class ConnectionRefused(UserError):
    """The controller refuses this player: another key, or another address."""


class KeyRefused(ConnectionRefused):
    """The controller wants another key."""


class PlayerFrame(NamedTuple):
    """A message: its kind, what its header says, and its bytes."""

    kind: str
    fields: Fields
    body: bytes


class FrameStream:
    """Frames to and from one peer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._clock = asyncio.get_running_loop().time
        self.heard = self._clock()  # when something last arrived, be it a part of a frame

    def send(self, kind: str, body: Iterable[bytes] = (), **fields: Any) -> None:
        """Put a frame into the buffer; nothing happens where the other side is gone.

        Raises:
            UserError: it is longer than the other side takes.
        """
        header, parts = json.dumps({"t": kind, **fields}).encode(), tuple(body)
        size = sum(map(len, parts))
        for length, most in ((len(header), MOST_HEADER), (size, MOST_BODY)):
            if length > most:
                raise UserError(
                    f"a {kind} of {length:,} bytes is too long to be sent between a run and its players, {most:,} at "
                    "most: let it have fewer or shorter episodes, or roll out in the run's process, without players"
                )
        if self._writer.is_closing():
            return
        with suppress(OSError, RuntimeError):
            self._writer.writelines((_HEAD.pack(len(header), size), header, *parts))

    async def drain(self) -> None:
        """Wait until the other side has taken most of what was sent."""
        with suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> PlayerFrame:
        """Return the next frame. Raises ConnectionEnded: there is none, or it is no frame."""
        try:
            header, body = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            if header > MOST_HEADER or body > MOST_BODY:
                raise ConnectionEnded(f"sent a frame of {header + body:,} bytes")
            fields = json.loads(await self._read(header))
            return PlayerFrame(fields.pop("t"), fields, await self._read(body))
        except (asyncio.IncompleteReadError, OSError):
            raise ConnectionEnded("closed the connection") from None
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ConnectionEnded(f"sent what is no frame ({type(error).__name__}: {error})") from None

    async def _read(self, size: int) -> bytes:
        """Read so many bytes, noting when each part of them comes. Raises IncompleteReadError: there are fewer."""
        self.heard, parts = self._clock(), []
        while size:
            if not (part := await self._reader.read(min(size, _CHUNK))):
                raise asyncio.IncompleteReadError(b"", size)
            self.heard = self._clock()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def close(self) -> None:
        """Close it, once what was sent has left."""
        self._writer.close()
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)

    def abort(self) -> None:
        """Close it at once: the other side hangs."""
        self._writer.transport.abort()


def open_listener(host: str, port: int) -> socket.socket:
    """Open a socket for players. Raises UserError: the address is none of this machine, or the port is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, proto=socket.IPPROTO_TCP)  # spelled out, or asyncio leaves Nagle's 40 ms on
    except OSError as error:
        raise UserError(f"players.host: {host!r} is no address ({error.strerror})") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen for players on {host}, port {port}: {error.strerror}; give another players.port"
        ) from None
    return listener


def split_url(url: str) -> SplitResult:
    """Split the address of a controller. Raises ConnectionRefused: it is none."""
    try:
        return split_address(url)
    except ValueError as error:
        raise ConnectionRefused(
            f"a player is given the controller's address, such as http://HOST:PORT, not {url!r}: {error}"
        ) from None


async def connect(url: str, key: str) -> FrameStream:
    """Open the connection to a controller.

    Raises:
        ConnectionRefused: the address is another server's.
        KeyRefused: it wants another key.
        OSError: nobody answers there.
        ConnectionEnded: somebody else does.
    """
    parts = split_url(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=_BUFFER)
    head = (
        f"GET {parts.path.rstrip('/')}{PATH} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\nAuthorization: Bearer {key}\r\n\r\n"
    )
    try:
        writer.write(head.encode())
        answer = await _read_head(reader)
    except BaseException:
        writer.close()
        raise
    status = answer[0].split(" ", 2)
    if status[1:2] == ["101"]:
        return FrameStream(reader, writer)
    writer.close()
    if status[1:2] == ["401"]:
        raise KeyRefused(f"{url} wants another key: put the run's into $AGENTRL_PLAYER_KEY")
    raise ConnectionRefused(f"{url} is no controller of a run: it answers {' '.join(status[1:]) or 'nothing'!s:.80}")


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> FrameStream | None:
    """Return the connection of who shows the key; None for who does not, and is answered so."""
    try:
        first, *lines = await _read_head(reader)
    except ConnectionEnded:
        writer.close()
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind, _, shown = headers.get("authorization", "").partition(" ")
    if first.split(" ")[:1] != ["GET"] or not first.split(" ")[1].endswith(PATH):
        answer = "404 Not Found"
    elif headers.get("origin") or kind.lower() != "bearer" or not _is_key(shown.strip(), key):
        answer = "401 Unauthorized"
    elif headers.get("upgrade", "").lower() != UPGRADE:
        answer = "426 Upgrade Required"
    else:
        writer.write(f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n\r\n".encode())
        return FrameStream(reader, writer)
    writer.write(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    writer.close()
    return None


async def start_server(listener: socket.socket, accepted: Any) -> asyncio.Server:
    """Start to call ``accepted`` with the streams of everybody who connects."""
    return await asyncio.start_server(accepted, sock=listener, limit=_BUFFER)


def _is_key(shown: str, key: str) -> bool:
    return secrets.compare_digest(shown.encode(), key.encode())


async def _read_head(reader: asyncio.StreamReader) -> list[str]:
    """Read the lines of an HTTP head. Raises ConnectionEnded: it is none."""
    try:
        with anyio.fail_after(_OPENING_S):  # asyncio.wait_for may lose a cancellation that comes with the answer
            head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
        raise ConnectionEnded("does not speak HTTP") from None
    if len(head) > _LONGEST_HEAD:
        raise ConnectionEnded("sent too long a head")
    lines = head.decode("latin-1").split("\r\n")[:-2]
    if not lines or " " not in lines[0]:
        raise ConnectionEnded("does not speak HTTP")
    return lines
