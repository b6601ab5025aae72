"""An MCP server that does what tests ask of it: ``tricks.py [--http PORT] [--banner] [--mute]``."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

server = MCPServer("tricks")
held: list[str] = []


class Point(BaseModel):
    x: int
    y: int = 0


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: Annotated[int, Field(ge=0, description="at least 0")] = 0) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float) -> str:
    """Wait, and say so."""
    try:
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        held.append("cancelled")
        raise
    return f"waited {seconds:g}"


@server.tool()
def hold(word: str) -> str:
    """Keep a word; all words so far."""
    held.append(word)
    return " ".join(held)


@server.tool()
def pid() -> str:
    """The process."""
    return str(os.getpid())


@server.tool()
def refuse(why: str) -> str:
    """Say no."""
    raise ToolError(why)


@server.tool()
def environment(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "none")


@server.tool(structured_output=True)
def point(at: Point) -> Point:
    """Move it."""
    return Point(x=at.x + 1, y=at.y)


@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"0123456789", format="png")


@server.tool()
async def block(seconds: float) -> str:
    """Hold the whole server up."""
    time.sleep(seconds)  # noqa: ASYNC251
    return "blocked"


@server.tool()
async def die() -> str:
    """End the process, at once."""
    os._exit(3)


if __name__ == "__main__":
    if "--banner" in sys.argv:
        print("Welcome to tricks!", flush=True)
    if "--mute" in sys.argv:
        print("I am not going to answer", file=sys.stderr, flush=True)
        sys.stdin.read()
    if "--broken" in sys.argv:
        raise RuntimeError("no database")
    if "--http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[sys.argv.index("--http") + 1]))
    server.run("stdio")
