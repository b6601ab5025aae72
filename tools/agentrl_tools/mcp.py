"""The tools of any MCP server: ``mcp:COMMAND ...`` or ``mcp:URL``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio

from agentrl import ContractError, InfraError, Tool, ToolError, Toolset, UserError
from agentrl.errors import suggest
from agentrl.tools.toolset import fork_error

if TYPE_CHECKING:
    import mcp_types as types

    from agentrl_tools.mcp_session import Connection


MAX_TOOLS, MAX_NAME, MAX_DESCRIPTION = 500, 128, 8_000  # tools; characters, of what the model is told


class Mcp(Toolset):
    """The tools that an MCP server lists, under its names, schemas and descriptions.

    All episodes share one session, or with ``per_episode`` each has one of its own, and with it a process.

    Args:
        server: a command line, or the URL of a streamable HTTP endpoint; ``$NAME`` in it is read from the environment,
            and written nowhere.
        prefix: what the tools' names begin with here.
        only: names of the tools to take; all by default.
        env: names of environment variables that a command is given, beside a few such as PATH and HOME.
        timeout_s: of a call; its cancellation is passed on to the server.
        retries: of a call whose server went away, failed or took too long.
        max_concurrency: calls of one tool at once; any number by default.
        start_timeout_s: how long a server may take until it answers.
        per_episode: for servers that keep something between calls.
        sessions: with ``per_episode``, how many at once; further episodes wait, within ``timeout_s``.
        headers: that are sent to a URL, such as ``Authorization``: ``Bearer $NAME``.
    """

    named_by = "server"
    needs = {"mcp": "mcp"}
    shared: _SharedServer

    def __init__(
        self,
        server: str,
        prefix: str = "",
        only: Sequence[str] = (),
        env: Sequence[str] = (),
        timeout_s: float = 30.0,
        retries: int = 0,
        max_concurrency: int | None = None,
        start_timeout_s: float = 30.0,
        per_episode: bool = False,
        sessions: int = 16,
        headers: dict[str, str] | None = None,
    ) -> None:
        if not start_timeout_s > 0 or sessions < 1:
            raise ContractError(
                f"tool 'mcp': start_timeout_s must be over 0, sessions 1 or more; not {start_timeout_s:g}, {sessions}"
            )
        if headers and not server.startswith(("http://", "https://")):
            raise ContractError(f"tool 'mcp': headers are for a URL, and {server!r} is a command")
        self.headers = headers or {}
        self.server, self.prefix, self.only, self.env = server, prefix, tuple(only), tuple(env)
        self.timeout_s, self.retries, self.max_concurrency = timeout_s, retries, max_concurrency
        self.start_timeout_s, self.per_episode, self.sessions = start_timeout_s, per_episode, sessions

    @asynccontextmanager
    async def open(self) -> AsyncIterator[_SharedServer]:
        server = _SharedServer(self)
        try:
            await server.open()
            yield server
        finally:
            with anyio.CancelScope(shield=True):
                await server.close()

    def begin(self) -> None:
        self._session: Connection | None = None
        self._starting = anyio.Lock()

    def fork(self) -> Self:
        if self.per_episode:
            raise fork_error(self, "with per_episode = true the server keeps what it holds, which cannot be copied")
        return self.start_episode(self.shared)

    async def close(self) -> None:
        if self._session is not None and self.per_episode:
            await self.shared.give_back(self._session)

    @property
    def tool_list(self) -> Sequence[Tool]:
        check = None if self.per_episode else self.shared.connection.ping
        return [
            replace(t, function=partial(self._call, name), health_check=check) for name, t in self.shared.tools.items()
        ]

    async def _call(self, name: str, /, **arguments: Any) -> str:
        patience_s = 0.9 * self.timeout_s  # within the tool's deadline, to tell why there is no session
        session = self.shared.connection
        if self.per_episode:
            async with self._starting:
                session = self._session = self._session or await self.shared.take(patience_s)
        result = await session.call(name, arguments, patience_s)
        text = _format_result(result)
        if result.is_error:
            raise ToolError(text or "the tool failed, and did not say why")
        return text


class _SharedServer:
    """The tools of a server, and its connection, or as many as episodes need; shared by all episodes."""

    def __init__(self, settings: Mcp) -> None:
        self.settings = settings
        self.tools: dict[str, Tool] = {}  # by the server's names
        self._slots = anyio.Semaphore(settings.sessions)
        self.connection = self._build_connection()
        self.fresh: list[Connection] = [self.connection]  # that no episode has had
        self.taken: set[Connection] = set()

    async def open(self) -> None:
        """Start the server and list its tools. Raises UserError: it cannot be started, or has no such tools."""
        listed = await self.connection.open()
        s, names = self.settings, [t.name for t in listed]
        for name in s.only:
            if name not in names:
                raise UserError(f"the MCP server {s.server!r} has no tool {name!r}{suggest(name, names)}")
        wanted = [t for t in listed if not s.only or t.name in s.only]
        if len(wanted) > MAX_TOOLS:
            raise UserError(
                f"the MCP server {s.server!r} has {len(wanted):,} tools, of {MAX_TOOLS} that an environment may have: "
                "name those it needs in tool.mcp.only"
            )
        try:
            with anyio.fail_after(s.start_timeout_s):
                self.tools = {t.name: await self._build_tool(t) for t in wanted}
        except TimeoutError:
            raise UserError(
                f"the schemas that the MCP server {s.server!r} lists cannot be read within {s.start_timeout_s:g} s "
                "(tool.mcp.start_timeout_s): name the tools it needs in tool.mcp.only"
            ) from None

    async def close(self) -> None:
        async with anyio.create_task_group() as closing:
            for connection in {*self.fresh, *self.taken, self.connection}:
                closing.start_soon(connection.close)

    async def take(self, patience_s: float) -> Connection:
        """Take a session for one episode. Raises InfraError ``mcp_gone``: there is none."""
        try:
            with anyio.fail_after(patience_s):
                await self._slots.acquire()
        except TimeoutError:
            s = self.settings
            raise InfraError(
                "mcp_gone", f"all {s.sessions} sessions of the MCP server {s.server!r} are taken"
            ) from None
        connection = self.fresh.pop() if self.fresh and self.fresh[0].is_open else self._build_connection()
        self.taken.add(connection)
        try:
            if not connection.is_open:
                await connection.open()
        except BaseException as error:
            self._release(connection)
            if isinstance(error, UserError):
                raise InfraError("mcp_gone", str(error)) from error
            raise
        return connection

    async def give_back(self, connection: Connection) -> None:
        """End the session's process: the next episode has one of its own."""
        try:
            await connection.close()
        finally:
            self._release(connection)

    def _release(self, connection: Connection) -> None:
        self.taken.discard(connection)
        self._slots.release()

    def _build_connection(self) -> Connection:
        try:
            from agentrl_tools.mcp_session import Connection
        except ImportError as error:
            raise UserError(f"tool 'mcp' needs the package mcp: pip install 'agentrl-gym[mcp]' ({error})") from None
        s = self.settings
        return Connection(s.server, s.env, s.start_timeout_s, once=s.per_episode, headers=s.headers)

    async def _build_tool(self, listed: types.Tool) -> Tool:

        from agentrl_tools.schema import build_check_off_loop

        s, what = self.settings, f"the tool {listed.name!r:.{MAX_NAME}} of the MCP server {self.settings.server!r}"
        if not 0 < len(listed.name) <= MAX_NAME or not listed.name.isprintable():
            raise UserError(
                f"{what}: a name has 1 to {MAX_NAME} characters that can be printed; leave it out (only=...)"
            )
        description = listed.description or listed.title or ""
        if len(description) > MAX_DESCRIPTION:
            description = f"{description[:MAX_DESCRIPTION]} [cut]"
        return Tool(
            s.prefix + listed.name,
            description,
            listed.input_schema,
            await build_check_off_loop(listed.input_schema, what),
            _format_result,
            timeout_s=s.timeout_s,
            retries=s.retries,
            max_concurrency=s.max_concurrency,
            writes=listed.annotations is None or not listed.annotations.read_only_hint,
        )


def _format_result(result: types.CallToolResult) -> str:
    """Format a result for the model: the texts; the structured content if there are none; the rest by its name."""
    parts = [_format_block(block) for block in result.content]
    if result.structured_content is not None and not any(b.type == "text" for b in result.content):
        parts.insert(0, json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(part for part in parts if part)


def _format_block(block: types.ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            size = len(block.data) * 3 // 4 - block.data.count("=")
            return f"[{block.type}: {block.mime_type}, {size} bytes, not shown]"
        case "resource_link":
            return f"[resource: {block.name}, {block.uri}]"
        case "resource":
            found = getattr(block.resource, "text", None)
            return found if found is not None else f"[resource: {block.resource.uri}, not shown]"
    return f"[{block.type}, not shown]"
