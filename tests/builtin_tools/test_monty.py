"""Monty: programs that would like to do harm, each in a session, with an innocent one beside it."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
from agentrl_tools.sandbox.fork_server_client import CodeResult
from agentrl_tools.sandbox.launch import SandboxLimits
from agentrl_tools.sandbox.monty import MontyPool, open_monty

from tests.helpers.monty_attacks import MONTY_ATTACKS, PRELUDE

pytest.importorskip("pydantic_monty")
LIMITS = SandboxLimits(memory_mb=64)


async def run(pool: MontyPool, code: str, session: str | None = None) -> CodeResult:
    return await pool.run(code, session=session, timeout_s=0.5)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_program_should_not_do_it_cannot(step: int) -> None:
    async def attack() -> dict[str, str]:
        bad = {}
        async with open_monty(LIMITS, 0.5, 4) as pool:
            await pool.run("mine = 'right'", session="innocent", timeout_s=60.0)
            for name, code in list(MONTY_ATTACKS.items())[::step]:
                result = await run(pool, PRELUDE + code, "guilty")
                if "ESCAPED" in result.output or len(result.output) > LIMITS.output_bytes + 1000:
                    bad[name] = result.output[-500:]
                beside = await run(pool, "mine", "innocent")
                if beside != CodeResult("ok", "'right'\n", 0):
                    bad[f"{name}: beside it"] = str(beside)
                await pool.end("guilty")
                after = await run(pool, "6 * 7")
                if after != CodeResult("ok", "42\n", 0):
                    bad[f"{name}: after it"] = str(after)
        return bad

    before = _peak_mb()
    assert anyio.run(attack) == {}
    assert _peak_mb() - before < 512
    assert len(MONTY_ATTACKS) >= 40


def _peak_mb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def test_a_value_is_printed_inside_and_its_error_has_no_lines_of_ours() -> None:
    async def say() -> list[tuple[str, str]]:
        codes = [
            "x = (1,\n2)\nx",
            "1 / 0",
            "x = 3",
            "None",
            "x = (",
            "'''a\nb'''",
            "for i in [1]:\n    i",
            "import math; 1",
        ]
        async with open_monty(LIMITS, 0.5) as pool:
            results = [await run(pool, code) for code in codes]
        return [(r.status, r.output) for r in results]

    assert anyio.run(say) == [
        ("ok", "(1, 2)\n"),
        (
            "raised",
            "Traceback (most recent call last):\n"
            '  File "<string>", line 1, in <module>\n'
            "ZeroDivisionError: division by zero\n",
        ),
        ("ok", ""),
        ("ok", ""),
        ("raised", "SyntaxError: unexpected EOF while parsing (<string>, line 1)\n"),
        ("ok", ""),
        ("ok", ""),
        ("ok", ""),
    ]


def test_more_sessions_than_run_at_once_keep_their_variables() -> None:
    async def count() -> list[str]:
        async with open_monty(LIMITS, 5.0, 2) as pool:
            for n in range(40):
                await pool.run(f"x = {n}", session=str(n), timeout_s=30.0)
            return [(await pool.run("x", session=str(n), timeout_s=30.0)).output for n in range(40)]

    assert anyio.run(count) == [f"{n}\n" for n in range(40)]


def test_a_session_that_met_its_limits_is_gone_and_says_so() -> None:
    async def fill() -> list[str]:
        async with open_monty(LIMITS, 2.0) as pool:
            await run(pool, "x = 1", "full")
            full = await pool.run(
                "y = []\nwhile True: y.append('a' * 1000 + str(len(y)))", session="full", timeout_s=60
            )
            lost = await pool.run("x", session="full", timeout_s=2.0, old=1)
            late = await run(pool, "while True: pass", "late")
            flood = await run(pool, "x = 1\nwhile True: print('x' * 1000)", "flood")
            kept = await run(pool, "x", "flood")
        return [full.status, lost.status, late.status, flood.output[-52:], kept.output]

    stop = "\n[over 65536 bytes of output: the code was stopped]\n"
    assert anyio.run(fill) == ["died", "lost", "timeout", stop, "1\n"]


def test_a_worker_that_is_killed_from_outside_is_replaced() -> None:
    async def kill() -> tuple[str, str]:
        async with open_monty(LIMITS, 2.0) as pool:
            await run(pool, "x = 1", "a")
            for pid in _list_workers():
                os.kill(pid, 9)
            died = await run(pool, "x", "a")
            return died.status, (await run(pool, "6 * 7")).output

    assert anyio.run(kill) == ("died", "42\n")


def _list_workers() -> list[int]:
    own = os.getpid()
    found = []
    for task in os.listdir(f"/proc/{own}/task"):
        for pid in Path(f"/proc/{own}/task/{task}/children").read_text().split():
            if b"monty" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found
