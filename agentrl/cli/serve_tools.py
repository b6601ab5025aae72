"""``agentrl serve-tools``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio
from pydantic import Field

from agentrl import __version__
from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import ConfigError, InfraError, ToolError, UserError, suggest
from agentrl.runtime.door import TOKEN_HELP, Door, choose_token, format_query
from agentrl.runtime.threads import run_in_thread
from agentrl.settings.section import Section
from agentrl.tools.call import call_tool
from agentrl.tools.tool import Tool
from agentrl.tools.toolset import Toolset, load_tool

if TYPE_CHECKING:
    from mcp.server import Server

TEXT = """\
  agentrl serve-tools calculator
  agentrl serve-tools calculator,my_tools.py:search --http 9000

Serves tools as an MCP server: over stdin and stdout, or at http://127.0.0.1:PORT/mcp. Toolsets are opened once;
all clients share one episode. A tool that refuses answers with an error that the model may read. Over HTTP a client
shows the token in the URL that is printed, or sends it as Authorization: Bearer.
"""
HINT = "use the whole URL that agentrl serve-tools printed, or send the token as Authorization: Bearer"


class _ServeToolsOptions(Section):
    http: int | None = Field(
        None, ge=0, le=65535, description="serve over HTTP on this port of 127.0.0.1; 0: a free one"
    )
    token: str | None = Field(None, description=TOKEN_HELP)
    tool: dict[str, dict[str, Any]] = Field({}, description="settings of tools: --tool.NAME.SETTING value")


class _StdioPipes(NamedTuple):
    read: int  # file descriptors
    write: int


def _run(arguments: Arguments[_ServeToolsOptions]) -> int:
    names = [name.strip() for name in arguments.names[0].split(",") if name.strip()]
    if not names:
        raise COMMAND.refuse(arguments.names)
    options = arguments.options
    for short in options.tool:
        if short not in (known := [name.partition(":")[0] for name in names]):
            raise ConfigError(f"tool.{short}: no tool of that name is served{suggest(short, known)}")
    if options.token is not None and options.http is None:
        raise ConfigError("--token does nothing without --http: over stdin and stdout there is one client")
    token = choose_token(options.token)
    try:
        import mcp.server  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"agentrl serve-tools needs the package mcp: pip install 'agentrl-gym[mcp]' ({error})"
        ) from None
    with nullcontext(None) if options.http is not None else _reserve_stdio() as pipes:
        loaded = [load_tool(name, options.tool.get(name.partition(":")[0])) for name in names]
        anyio.run(_serve, loaded, options.http, token, pipes)
    return 0


@contextmanager
def _reserve_stdio() -> Iterator[_StdioPipes]:
    """Keep stdin and stdout for the protocol: other code that reads finds nothing, and prints to stderr."""
    pipes, empty = _StdioPipes(os.dup(0), os.dup(1)), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    try:
        yield pipes
    finally:
        sys.stdout.flush()
        os.dup2(pipes.read, 0)
        os.dup2(pipes.write, 1)


async def _serve(loaded: Sequence[Tool | Toolset], port: int | None, token: str, pipes: _StdioPipes | None) -> None:
    async with _open_tools(loaded) as tools:
        server = _build_server(tools)
        await (_over_stdio(server, pipes) if pipes is not None else _over_http(server, port or 0, token))


async def _on_end_signal(end: Callable[[], None]) -> None:
    """Call ``end`` at Ctrl-C and at SIGTERM."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            end()


@asynccontextmanager
async def _open_tools(loaded: Sequence[Tool | Toolset]) -> AsyncIterator[dict[str, Tool]]:
    """Open toolsets and begin one episode of each; yield all tools by name. Raises UserError."""
    async with AsyncExitStack() as held:
        tools: list[Tool] = []
        for one in loaded:
            if isinstance(one, Tool):
                tools.append(one)
                continue
            own = one.start_episode(await held.enter_async_context(one.open()))
            held.push_async_callback(own.close)
            tools += own.tool_list
        names = [t.name for t in tools]
        if len(set(names)) < len(names):
            raise ConfigError(f"two tools are called {next(n for n in names if names.count(n) > 1)!r}")
        yield {t.name: t for t in tools}


def _build_server(tools: dict[str, Tool]) -> Server[Any]:
    """Build an MCP server of tools, with their schemas as they are."""
    import mcp_types as types
    from mcp import MCPError
    from mcp.server import Server

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[describe(t) for t in tools.values()])

    def describe(t: Tool) -> types.Tool:
        hints = None if t.writes is None else types.ToolAnnotations(read_only_hint=not t.writes)
        return types.Tool(name=t.name, description=t.description, input_schema=t.parameters, annotations=hints)

    async def call_by_name(_context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        if request.name not in tools:
            return _reply(f"unknown tool {request.name!r}{suggest(request.name, tools)}", error=True)
        try:
            return _reply(await call_tool(tools[request.name], request.arguments or {}))
        except ToolError as refusal:
            return _reply(str(refusal), error=True)
        except InfraError as fault:
            raise MCPError(types.INTERNAL_ERROR, str(fault), {"fault": fault.kind}) from fault
        except UserError as error:  # of the tool's author
            raise MCPError(types.INTERNAL_ERROR, str(error)) from error

    def _reply(text: str, *, error: bool = False) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=error)

    return Server("agentrl", version=__version__, on_list_tools=list_tools, on_call_tool=call_by_name)


async def _over_stdio(server: Server[Any], pipes: _StdioPipes) -> None:
    from mcp.server.stdio import stdio_server

    output = anyio.wrap_file(os.fdopen(pipes.write, "w", encoding="utf-8", closefd=False))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_on_end_signal, tasks.cancel_scope.cancel)
        async with stdio_server(stdin=cast(Any, _lines(pipes.read)), stdout=output) as (read, write):
            await server.run(read, write, server.create_initialization_options())
        tasks.cancel_scope.cancel()


async def _lines(file: int) -> AsyncIterator[str]:
    """Yield lines, read in a thread that nobody waits for: at Ctrl-C the client may not have closed the pipe."""
    rest = b""
    while data := await run_in_thread(partial(os.read, file, 1 << 16)):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


async def _over_http(server: Server[Any], port: int, token: str) -> None:
    import uvicorn

    from agentrl.runtime.loopback_server import LoopbackServer, listen_on_loopback

    try:
        listener = listen_on_loopback(port)
    except OSError as error:
        raise UserError(f"cannot listen on port {port}: {error.strerror}") from None
    config = uvicorn.Config(
        cast(Any, Door(cast(Any, server.streamable_http_app(json_response=True)), token, hint=HINT)),
        log_level="warning",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=60,
    )
    web = LoopbackServer(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_on_end_signal, lambda: setattr(web, "should_exit", True))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp{format_query(token)}", file=sys.stderr, flush=True)
        await web.serve(sockets=[listener])
        tasks.cancel_scope.cancel()


COMMAND = Command(
    "serve-tools",
    "NAME[,NAME...] [--http PORT [--token TOKEN]] [--tool.NAME.SETTING VALUE ...]",
    TEXT,
    _run,
    _ServeToolsOptions,
    names=(1, 1),
)
