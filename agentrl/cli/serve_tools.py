"""``agentrl serve-tools``."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio
from pydantic import Field

from agentrl import __version__
from agentrl.aside import in_thread
from agentrl.cli.words import flags
from agentrl.config import Section
from agentrl.env import called
from agentrl.errors import ConfigError, ToolError, UserError, WorldFault, nearest
from agentrl.tool import Tool
from agentrl.toolset import Toolset, named

if TYPE_CHECKING:
    from mcp.server import Server

HELP = """usage: agentrl serve-tools NAME[,NAME...] [--http PORT] [--tool.NAME.SETTING VALUE ...]

  agentrl serve-tools calculator
  agentrl serve-tools calculator,my_tools.py:search --http 9000

Serves tools as an MCP server: over stdin and stdout, or at http://127.0.0.1:PORT/mcp. Toolsets are opened once;
whoever calls them shares one episode. A tool that says no is an error that the model may read.
"""


class Settings(Section):
    http: int | None = Field(
        None, ge=0, le=65535, description="serve over HTTP on this port of 127.0.0.1; 0: a free one"
    )
    tool: dict[str, dict[str, Any]] = Field({}, description="settings of tools: --tool.NAME.SETTING value")


class Wire(NamedTuple):
    read: int  # file descriptors
    write: int


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    names = [name.strip() for name in words[0].split(",") if name.strip()]
    if words[0].startswith("-") or not names:
        raise ConfigError(f"agentrl serve-tools begins with names of tools, not {words[0]!r}")
    settings = flags(words[1:], Settings)
    for short in settings.tool:
        if short not in (known := [name.partition(":")[0] for name in names]):
            raise ConfigError(f"tool.{short}: no tool of that name is served{nearest(short, known)}")
    try:
        import mcp.server  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"agentrl serve-tools needs the package mcp: pip install 'agentrl-gym[mcp]' ({error})"
        ) from None
    with nullcontext(None) if settings.http is not None else _wire() as wire:
        found = [named(name, settings.tool.get(name.partition(":")[0])) for name in names]
        anyio.run(_serve, found, settings.http, wire)
    return 0


@contextmanager
def _wire() -> Iterator[Wire]:
    """Stdin and stdout for the protocol alone: whoever else reads finds nothing, and prints to stderr."""
    wire, empty = Wire(os.dup(0), os.dup(1)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    try:
        yield wire
    finally:
        sys.stdout.flush()
        os.dup2(wire.read, 0)
        os.dup2(wire.write, 1)


async def _serve(found: Sequence[Tool | Toolset], port: int | None, wire: Wire | None) -> None:
    async with opened(found) as tools:
        server = server_of(tools)
        await (_over_stdio(server, wire) if wire is not None else _over_http(server, port or 0))


async def _until_told(end: Callable[[], None]) -> None:
    """Calls ``end`` at Ctrl-C and at SIGTERM."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            end()


@asynccontextmanager
async def opened(found: Sequence[Tool | Toolset]) -> AsyncIterator[dict[str, Tool]]:
    """The tools by name; toolsets are open, and have begun one episode. Raises UserError."""
    async with AsyncExitStack() as held:
        tools: list[Tool] = []
        for one in found:
            if isinstance(one, Tool):
                tools.append(one)
                continue
            own = one.of_episode(await held.enter_async_context(one.open()))
            held.push_async_callback(own.close)
            tools += own.tool_list
        names = [t.name for t in tools]
        if len(set(names)) < len(names):
            raise ConfigError(f"two tools are called {next(n for n in names if names.count(n) > 1)!r}")
        yield {t.name: t for t in tools}


def server_of(tools: dict[str, Tool]) -> Server[Any]:
    """An MCP server of tools, with their schemas as they are."""
    import mcp_types as types
    from mcp import MCPError
    from mcp.server import Server

    async def listed(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[described(t) for t in tools.values()])

    def described(t: Tool) -> types.Tool:
        hints = None if t.writes is None else types.ToolAnnotations(read_only_hint=not t.writes)
        return types.Tool(name=t.name, description=t.description, input_schema=t.parameters, annotations=hints)

    async def call(_context: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        if asked.name not in tools:
            return _said(f"unknown tool {asked.name!r}{nearest(asked.name, tools)}", error=True)
        try:
            return _said(await called(tools[asked.name], asked.arguments or {}))
        except ToolError as refusal:
            return _said(str(refusal), error=True)
        except WorldFault as fault:
            raise MCPError(types.INTERNAL_ERROR, str(fault), {"fault": fault.kind}) from fault
        except UserError as error:  # of whoever wrote the tool
            raise MCPError(types.INTERNAL_ERROR, str(error)) from error

    def _said(words: str, *, error: bool = False) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text=words)], is_error=error)

    return Server("agentrl", version=__version__, on_list_tools=listed, on_call_tool=call)


async def _over_stdio(server: Server[Any], wire: Wire) -> None:
    from mcp.server.stdio import stdio_server

    output = anyio.wrap_file(os.fdopen(wire.write, "w", encoding="utf-8", closefd=False))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_until_told, tasks.cancel_scope.cancel)
        async with stdio_server(stdin=cast(Any, _lines(wire.read)), stdout=output) as (read, write):
            await server.run(read, write, server.create_initialization_options())
        tasks.cancel_scope.cancel()


async def _lines(file: int) -> AsyncIterator[str]:
    """Read in a thread that nobody waits for: at Ctrl-C the client may not have closed it."""
    rest = b""
    while data := await in_thread(partial(os.read, file, 1 << 16)):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


async def _over_http(server: Server[Any], port: int) -> None:
    import uvicorn

    class Loopback(uvicorn.Server):
        def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
            return nullcontext()

    heard = socket.socket(proto=socket.IPPROTO_TCP)  # said aloud, or asyncio leaves Nagle's 40 ms on
    heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        heard.bind(("127.0.0.1", port))
        heard.listen(128)
    except OSError as error:
        heard.close()
        raise UserError(f"cannot listen on port {port}: {error.strerror}") from None
    config = uvicorn.Config(
        server.streamable_http_app(json_response=True),
        log_level="warning",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=60,
    )
    web = Loopback(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_until_told, lambda: setattr(web, "should_exit", True))
        print(f"http://127.0.0.1:{heard.getsockname()[1]}/mcp", file=sys.stderr, flush=True)
        await web.serve(sockets=[heard])
        tasks.cancel_scope.cancel()
