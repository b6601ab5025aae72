"""What a tool call through MCP costs: one after the other, and many at once, over stdio and over HTTP.

    python benchmarks/mcp_calls.py [--calls 500] [--at_once 200]

The server is ``agentrl serve-tools calculator``; the same tool called here is the line to compare with.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from time import perf_counter

import anyio
from agentrl_tools.calculator import calculator
from agentrl_tools.mcp import Mcp

from agentrl import Tool

SERVE = [sys.executable, "-m", "agentrl", "serve-tools", "calculator"]


async def measure(name: str, tool: Tool, calls: int, at_once: int) -> None:
    async def some(number: int) -> None:
        for _ in range(number):
            await tool(expression="(12+7)*3")

    await some(20)
    begun = perf_counter()
    await some(calls)
    alone_s = (perf_counter() - begun) / calls
    begun = perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(some, max(calls // at_once, 1) * 4)
    rate = at_once * max(calls // at_once, 1) * 4 / (perf_counter() - begun)
    print(f"{name:<8} {alone_s * 1000:6.2f} ms a call   {rate:7.0f} calls/s, {at_once} at once", flush=True)


async def through(name: str, server: str, calls: int, at_once: int) -> None:
    toolset = Mcp(server, timeout_s=60.0)
    begun = perf_counter()
    async with toolset.open() as shared:
        start_s = perf_counter() - begun
        await measure(name, toolset.start_episode(shared).tool_list[0], calls, at_once)
    print(f"{'':<8} {start_s:6.2f} s to connect", flush=True)


async def main(calls: int, at_once: int) -> None:
    await measure("here", calculator, calls, at_once)
    await through("stdio", " ".join(SERVE), calls, at_once)
    with subprocess.Popen([*SERVE, "--http", "0"], stderr=subprocess.PIPE, text=True) as server:  # noqa: ASYNC220
        assert server.stderr is not None
        try:
            url = await anyio.to_thread.run_sync(server.stderr.readline)
            await through("http", url.strip(), calls, at_once)
        finally:
            server.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--at_once", type=int, default=200)
    given = parser.parse_args()
    anyio.run(main, given.calls, given.at_once)
