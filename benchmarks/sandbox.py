"""Calls of Python in the sandbox: milliseconds of a call alone, and calls a second with four at once.

    python benchmarks/sandbox.py [--rounds 10] [--before ANOTHER_CHECKOUT] [--cases python,state]

With ``--before`` both checkouts are measured in turns, round by round, and the ratio is the median of the rounds':
what else runs on the machine slows both. Beside them, what the same costs by a fresh interpreter in bubblewrap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

CALLS, AT_ONCE = 40, 4
CODE = "print(2 + 2)"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "python": ({"sandbox": "bubblewrap"}, CODE),
    "numpy": ({"sandbox": "bubblewrap"}, "import numpy; print(numpy.arange(4).sum())"),
    "sympy": ({"sandbox": "bubblewrap"}, "import sympy as s; print(s.integrate(s.Symbol('x') ** 2))"),
    "state": ({"sandbox": "bubblewrap", "state": True}, CODE),
    "landlock": ({"sandbox": "landlock"}, CODE),
    "landlock numpy": ({"sandbox": "landlock"}, "import numpy; print(numpy.arange(4).sum())"),
    "monty": ({"sandbox": "monty"}, CODE),
}


async def serve(cases: list[str]) -> None:
    """Open the tools of this checkout; measure a case for each line that comes in."""
    from agentrl_tools.python import Python

    async with AsyncExitStack() as held:
        episodes: dict[str, list[Any]] = {}
        for name in cases:
            kit = Python(**CASES[name][0])
            try:
                shared = await held.enter_async_context(kit.open())
            except Exception as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            episodes[name] = [kit.start_episode(shared).tool_list[0] for _ in range(AT_ONCE)]
            for tool in episodes[name]:
                await tool(code=CASES[name][1])
        print(json.dumps(list(episodes)), flush=True)
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(json.dumps(await measure(episodes[name], CASES[name][1])), flush=True)


async def measure(tools: list[Any], code: str) -> tuple[float, float]:
    """Return the median seconds of a call alone, and calls a second with four at once."""
    alone = []
    for number in range(CALLS):
        began = perf_counter()
        await tools[number % AT_ONCE](code=code)
        alone.append(perf_counter() - began)
    left = iter(range(CALLS * 2))

    async def work(tool: Any) -> None:
        for _ in left:
            await tool(code=code)

    began = perf_counter()
    await asyncio.gather(*(work(tool) for tool in tools))
    return statistics.median(alone), CALLS * 2 / (perf_counter() - began)


class Checkout:
    """A process that measures one checkout's sandbox."""

    def __init__(self, path: Path, cases: list[str]) -> None:
        sources = os.pathsep.join(str(path / part) for part in ("", "envs", "tools"))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--cases", ",".join(cases)],
            env={**os.environ, "PYTHONPATH": sources},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cases: list[str] = self._read()

    def measure(self, case: str) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        alone, rate = self._read()
        return alone, rate

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a checkout's process ended")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure_cold() -> float:
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", sys.executable, "-I", "-c", CODE]
    seconds = []
    for _ in range(10):
        began = perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(perf_counter() - began)
    return statistics.median(seconds)


def main(rounds: int, before: Path | None, cases: list[str]) -> None:
    sides = [Checkout(Path(__file__).parent.parent, cases)]
    sides += [Checkout(before, cases)] if before else []
    print(f"load {os.getloadavg()[0]:.1f}; medians of {rounds} rounds of {CALLS} calls alone, {2 * CALLS} by {AT_ONCE}")
    print(
        f"{'':<16}{'ms a call':>12}{'calls/s':>10}"
        + (f"{'before':>12}{'':>10}{'x ms':>8}{'x calls/s':>11}" * bool(before))
    )
    for case in sides[0].cases:
        found: list[list[tuple[float, float]]] = [[] for _ in sides]
        for turn in range(rounds):
            for side in range(len(sides))[:: 1 if turn % 2 else -1]:
                found[side].append(sides[side].measure(case))
        middle = [[statistics.median(column) for column in zip(*rows, strict=True)] for rows in found]
        line = f"{case:<16}" + "".join(f"{alone * 1e3:>12.2f}{rate:>10.0f}" for alone, rate in middle)
        if before:
            pairs = list(zip(*found, strict=True))
            line += f"{statistics.median(a[0] / b[0] for a, b in pairs):>8.2f}"
            line += f"{statistics.median(a[1] / b[1] for a, b in pairs):>11.2f}"
        print(line, flush=True)
    if shutil.which("bwrap"):
        print(f"{'a fresh Python':<16}{measure_cold() * 1e3:>12.2f}")
    print(f"load {os.getloadavg()[0]:.1f}")
    for checkout in sides:
        checkout.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.cases.split(",")
    if given.serve:
        asyncio.run(serve(names))
    else:
        main(given.rounds, given.before, names)
