"""A worker that calls an agent's function, for many episodes at once: ``python -m agentrl.agents.worker TARGET``.

A line of JSON on stdin begins an episode (``id``, ``task``) or cancels one (``id``, ``cancel``); a line on stdout says
that a cancellation was heard (``id``, ``heard``), or how one ended (``id``, ``error``, ``trace``). What the function
prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import httpx2

from agentrl.agents.task import Task
from agentrl.errors import UserError
from agentrl.settings.registry import import_object

Solve = Callable[[Task], Awaitable[object]]


def play_episodes() -> None:
    """Play what stdin says, until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # print() of the agent is no answer
    try:
        solve = load_solve(sys.argv[1])
    except UserError as error:
        answers.write(json.dumps({"refused": str(error)}) + "\n")
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    asyncio.run(_serve(solve, lambda answer: answers.write(json.dumps(answer) + "\n")))


def load_solve(target: str) -> Solve:
    """Import an agent's function. Raises UserError: it cannot be imported, or is not ``async def``."""
    solve: Solve = import_object("agent", target)
    if not inspect.iscoroutinefunction(solve):
        raise UserError(f"agent {target!r} is {solve!r:.80}, not an `async def` of a task")
    return solve


async def _serve(solve: Solve, answer: Callable[[dict[str, Any]], object]) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    reader = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False) as http:  # no proxy between us
        while line := await reader.readline():
            asked = json.loads(line)
            number = asked["id"]
            if asked.get("cancel"):
                with suppress(BrokenPipeError):
                    answer({"id": number, "heard": True})
                if number in running:
                    running[number].cancel()
                continue
            running[number] = asyncio.create_task(_solve(solve, Task(**asked["task"], http=http), number, answer))
            running[number].add_done_callback(partial(_forget, running, number))
        for task in running.values():
            task.cancel()


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del running[number]


async def _solve(solve: Solve, task: Task, number: int, answer: Callable[[dict[str, Any]], object]) -> None:
    error = trace = ""
    try:
        await solve(task)
    except BaseException as raised:  # whatever it is, it is this episode's
        own = asyncio.current_task()
        if not (isinstance(raised, asyncio.CancelledError) and own is not None and own.cancelling()):
            error, trace = describe_error(raised), traceback.format_exc(limit=-6)
    with suppress(BrokenPipeError):  # the run has been killed, and stdin ends as well
        answer({"id": number, "error": error, "trace": trace})


def describe_error(raised: BaseException) -> str:
    """Describe an exception by its type and the first line of what it says."""
    said = str(raised).strip().splitlines()
    return type(raised).__name__ + (f": {said[0][:200]}" if said else "")


if __name__ == "__main__":
    play_episodes()
