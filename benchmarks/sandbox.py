"""Calls of Python in the sandbox: time of a call alone, and calls a second with several at once.

    python benchmarks/sandbox.py [--calls 300]

Beside it, what the same costs by a fresh interpreter in the same bubblewrap, which is how it is often done.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter

import anyio
from agentrl_tools.python import Python
from agentrl_tools.sandbox import launch
from agentrl_tools.shell import Shell

CODE = "print(2 + 2)"
Call = Callable[[], Awaitable[object]]


async def alone(call: Call, calls: int) -> float:
    """Seconds a call."""
    await call()
    began = perf_counter()
    for _ in range(calls):
        await call()
    return (perf_counter() - began) / calls


async def together(call: Call, calls: int, at_once: int) -> float:
    """Calls a second."""
    left = iter(range(calls))

    async def work() -> None:
        for _ in left:
            await call()

    began = perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(work)
    return calls / (perf_counter() - began)


def cold(calls: int) -> float:
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", sys.executable, "-I", "-c", CODE]
    began = perf_counter()
    for _ in range(calls):
        subprocess.run(command, check=True, capture_output=True)
    return (perf_counter() - began) / calls


async def main(calls: int) -> None:
    kits = {f"python, {kind}": Python(sandbox=kind) for kind in ("bubblewrap", "landlock", "monty")}  # type: ignore[arg-type]
    kits["python, bubblewrap, state"] = Python(sandbox="bubblewrap", state=True)
    found = {}
    for name, kit in kits.items():
        try:
            async with kit.open() as shared:
                episodes = [kit.start_episode(shared) for _ in range(4)]
                each = iter(range(1 << 60))
                call = lambda e=episodes, n=each: e[next(n) % 4].tool_list[0](code=CODE)  # noqa: E731
                found[name] = (await alone(call, calls), await together(call, calls, 4))
                warm = lambda e=episodes: e[0].tool_list[0](code="import numpy; print(2 + 2)")  # noqa: E731
                if kit.sandbox == "bubblewrap" and not kit.state:
                    found["python, bubblewrap, numpy"] = (await alone(warm, calls), await together(warm, calls, 4))
        except Exception as error:
            print(f"{name}: {error}")
    shell = Shell()
    async with shell.open() as shared:
        episode = shell.start_episode(shared)
        run = next(t for t in episode.tool_list if t.name == "shell")
        found["shell"] = (await alone(lambda: run(command="echo 4"), calls), 0.0)
        await episode.close()
    fresh = cold(20) if launch.explain_no_bubblewrap() is None else float("nan")
    print(f"{'':<28}{'ms a call':>10}{'calls/s, 4 at once':>20}{'times faster than cold':>24}")
    for name, (seconds, rate) in found.items():
        print(f"{name:<28}{seconds * 1e3:>10.2f}{rate:>20.0f}{fresh / seconds:>24.1f}")
    print(f"{'a fresh python in bwrap':<28}{fresh * 1e3:>10.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    anyio.run(main, parser.parse_args().calls)
