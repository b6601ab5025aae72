"""A connection to an MCP server, kept by a task of its own, which makes it again when the server has gone.

open ---> session ---> lost ---> (a pause, growing) ---> session ---> ... ---> close
             |           |
             |           calls that were on their way: InfraError("mcp_gone")
             calls        others wait for the next session
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp import Client, MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST, CallToolResult, Implementation, Tool

from agentrl import __version__
from agentrl.errors import InfraError, ToolError, UserError
from agentrl.settings.secret import Secret
from agentrl_tools.mcp_transport import BROKEN, NOT_SENT, Link, is_url, open_transport, parse_command

QUIET_S = 5.0  # a session that lasted shorter than that was no good one: the next is made after a longer pause
PAUSE_S = 5.0  # the longest
MAX_PAGES, MAX_LISTED = 100, 10_000  # of the list of tools
MAX_ERROR = 2_000  # characters of a server's error
MAX_KINDS = 16  # of faults that a server names
ACCIDENTS = 3  # losses with calls on their way; a request that crashes the server does so again and again

INFO = Implementation(name="agentrl", version=__version__)

# What it tells of reaches us as exceptions, and a server's noise on stdout would be a traceback for each line.
logging.getLogger("mcp.client").setLevel(logging.CRITICAL)


class _LiveSession:
    """A client while its server answers."""

    def __init__(self, client: Client, link: Link) -> None:
        self.client, self.link = client, link
        self.calls = 0
        self.lost_calls = 0  # that were on their way when it was lost
        self.idle = asyncio.Event()  # no call is on its way
        self.idle.set()

    @asynccontextmanager
    async def track_call(self) -> AsyncIterator[None]:
        self.calls += 1
        self.idle.clear()
        try:
            yield
        except asyncio.CancelledError:  # a time-out, for all we know
            self.link.doubted.set()
            raise
        finally:
            self.calls -= 1
            if not self.calls:
                self.idle.set()

    async def wait_until_lost(self, patience_s: float) -> None:
        """Wait until it is lost. One that let a call time out must answer something else within ``patience_s``."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, patience_s)
            await self.link.lost.wait()
            tasks.cancel_scope.cancel()

    async def _watch(self, patience_s: float) -> None:
        while True:
            await self.link.doubted.wait()
            self.link.doubted.clear()
            with anyio.move_on_after(patience_s) as waiting, suppress(MCPError):  # an error is an answer
                await self.client.list_tools(cache_mode="bypass")
            if waiting.cancelled_caught:
                self.link.lose(f"it has not answered anything for {patience_s:g} s")


class Connection:
    """One server's sessions, one after the other; with ``once``, one only: what it held dies with it.

    Args:
        server: a command line, or the URL of a streamable HTTP endpoint.
        env: names of environment variables that a command is given, beside a few such as PATH and HOME.
        start_timeout_s: how long a server may take until it answers, at first and again.
        headers: that are sent to a URL.
    """

    def __init__(
        self,
        server: str,
        env: Sequence[str] = (),
        start_timeout_s: float = 30.0,
        *,
        once: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.headers = headers or {}
        self.server, self.env, self.start_timeout_s, self.once = server, tuple(env), start_timeout_s, once
        self._session: _LiveSession | None = None
        self._changed = asyncio.Event()  # set when there is a session, or never will be one
        self._why = "not open"
        self._owner: asyncio.Task[None] | None = None
        self._ended = False
        self._waiting: anyio.CancelScope | None = None
        self._first: UserError | None = None
        self._losses = 0  # with calls on their way
        self._kinds: set[str] = set()  # of faults that it named

    @property
    def is_open(self) -> bool:
        return self._owner is not None and not self._ended

    async def open(self) -> list[Tool]:
        """Start the server and list its tools. Raises UserError: it cannot be started, in its own last words."""
        self._owner = asyncio.create_task(self._run(), name=f"MCP server {self.server}")
        try:
            await self._changed.wait()
            if self._first is not None:
                raise self._first
            return await self._list_tools()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    async def close(self) -> None:
        """End the server. Its process is gone afterwards."""
        self._ended = True
        self._changed.set()
        if self._waiting is not None:
            self._waiting.cancel()
        if self._session is not None:
            self._session.link.lose("it was closed")
        if self._owner is not None:
            await asyncio.wait({self._owner})

    async def call(self, name: str, arguments: Mapping[str, Any], patience_s: float) -> CallToolResult:
        """Call a tool; while the server is being started again, wait for it ``patience_s``.

        Raises:
            InfraError: ``mcp_gone``: the server went away in mid-call, or did not come back; ``mcp_error``: it failed.
            ToolError: it does not take these arguments.
        """
        while True:
            session = await self._wait_for_session(patience_s)
            try:
                async with session.track_call():
                    return await session.client.call_tool(name, dict(arguments))
            except MCPError as error:
                if not _is_unsent(error):
                    raise self._explain(name, error, session) from error
                session.link.lose(error.message)  # the call never reached it: again, when it is back

    async def _wait_for_session(self, patience_s: float) -> _LiveSession:
        with anyio.move_on_after(patience_s):
            while not self._ended:
                if self._session is not None and not self._session.link.lost.is_set():
                    return self._session
                self._changed.clear()
                await self._changed.wait()
        raise InfraError("mcp_gone", f"the MCP server {self.server!r} is gone: {self._why}")

    async def ping(self) -> None:
        """Ask the server for anything at all. Raises an exception: it does not answer."""
        session = await self._wait_for_session(self.start_timeout_s)
        await session.client.list_tools(cache_mode="bypass")

    def _explain(self, name: str, error: MCPError, session: _LiveSession) -> Exception:
        # Servers have errors of that number too, which a request may bring about.
        if error.code == CONNECTION_CLOSED and (session.link.lost.is_set() or error.data == BROKEN):
            why = session.link.why or error.message
            words = f"the MCP server {self.server!r} went away while it ran {name!r}: {why}"
            return InfraError("mcp_gone", words, self._find_provenance(session))
        said = f"{error.message:.{MAX_ERROR}}"
        if error.code == INVALID_PARAMS:
            return ToolError(said)
        return InfraError(self._read_kind(error.data), f"the MCP server {self.server!r}, in {name!r}: {said}")

    def _read_kind(self, data: object) -> str:
        """Return the kind of fault that a server names; ``mcp_error`` where it is no word, or one too many.

        Faults are counted by it: each is a metric of the run.
        """
        kind = data.get("fault") if isinstance(data, dict) else None
        if not isinstance(kind, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", kind):
            return "mcp_error"
        if len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
        return kind if kind in self._kinds else "mcp_error"

    def _find_provenance(self, session: _LiveSession) -> bool | None:
        """Return False for a loss with several calls, of which one cannot be told from another; None for one alone.

        After many losses it is no accident any more: True.
        """
        if not session.lost_calls:
            session.lost_calls = session.calls + 1
            self._losses += 1
        if self._losses > ACCIDENTS:
            return True
        return False if session.lost_calls > 1 else None

    async def _list_tools(self) -> list[Tool]:
        """List the tools, all pages of them, within ``start_timeout_s``. Raises UserError: there is no end of them."""
        session, found, cursor = await self._wait_for_session(self.start_timeout_s), list[Tool](), None
        try:
            with anyio.fail_after(self.start_timeout_s):
                for _ in range(MAX_PAGES):
                    page = await session.client.list_tools(cursor=cursor)
                    found += page.tools
                    if (cursor := page.next_cursor) is None:
                        return found
                    if len(found) > MAX_LISTED:
                        raise UserError(f"the MCP server {self.server!r} lists over {MAX_LISTED:,} tools")
        except (MCPError, TimeoutError) as error:
            why = session.link.why or str(error) or f"not all of them within {self.start_timeout_s:g} s"
            raise UserError(f"the MCP server {self.server!r} does not list its tools: {why}") from error
        raise UserError(f"the MCP server {self.server!r} lists its tools on over {MAX_PAGES} pages, without an end")

    async def _run(self) -> None:
        """Hold sessions, one after the other, until it is closed."""
        failed, first = 0, True
        while not self._ended:
            begun = anyio.current_time()
            try:
                await self._hold()
            except UserError as error:
                self._why = str(error)
                if first:
                    self._first = error
                    break
            first = False
            if self.once:
                break
            failed = failed + 1 if anyio.current_time() - begun < QUIET_S else 0
            if failed > 1 and not self._ended:
                with self._interruptible(min(0.1 * 2.0**failed, PAUSE_S)):
                    await anyio.sleep_forever()
        self._ended = True
        self._changed.set()

    async def _hold(self) -> None:
        """Hold one session, from its start until it is over. Raises UserError: it cannot be started."""
        parameters = Secret(self.server).reveal() if is_url(self.server) else parse_command(self.server, self.env)
        headers = {name: Secret(value).reveal() for name, value in self.headers.items()}
        link, begun = Link(self.server), False
        why = f"it has not answered for {self.start_timeout_s:g} s (tool.mcp.start_timeout_s)"
        try:
            with self._interruptible(self.start_timeout_s) as scope:
                async with Client(open_transport(link, parameters, headers), client_info=INFO) as client:
                    scope.deadline, self._waiting, begun = math.inf, None, True
                    await self._use(_LiveSession(client, link))
            why += link.describe_end()
        except Exception as error:  # once begun, it has been lost already, and broke as it was closed
            why = link.explain(error)
        finally:
            link.tail.close()
        if not begun and not self._ended:
            raise UserError(f"the MCP server {self.server!r} cannot be started: {why}")

    async def _use(self, session: _LiveSession) -> None:
        self._session = session
        self._changed.set()
        try:
            await session.wait_until_lost(self.start_timeout_s)
        finally:
            self._session, self._why = None, session.link.why
        if is_url(self.server) and not self._ended:
            with self._interruptible(math.inf):
                await session.idle.wait()  # HTTP may answer yet, within the calls' deadlines

    def _interruptible(self, seconds: float) -> anyio.CancelScope:
        """Return a deadline for what ``close`` need not wait for."""
        self._waiting = anyio.CancelScope(deadline=anyio.current_time() + seconds)
        return self._waiting


def _is_unsent(error: MCPError) -> bool:
    """Return True if the server cannot have begun with the call."""
    return error.data == NOT_SENT or (error.code == INVALID_REQUEST and error.message == "Session terminated")
