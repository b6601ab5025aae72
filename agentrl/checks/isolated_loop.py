"""An event loop in a thread of its own: the caller's functions are not on its stack, and it may be left behind."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from agentrl.checks.budget import CheckRun
from agentrl.checks.finding import Finding
from agentrl.checks.open_resources import check_leftovers, count_open
from agentrl.environments.spec import EnvSpec

T = TypeVar("T")
THREAD = "agentrl inspection"
PATIENCE_S = 5.0  # for the loop to end: tasks that cannot be cancelled would hold it for ever


def _run_isolated(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run an async function in an event loop of its own thread; return its result. Ctrl-C cancels it."""
    done, started = Future[T](), Future[tuple[BlockingPortal, anyio.CancelScope]]()

    async def go() -> None:
        async with BlockingPortal() as portal:
            with anyio.CancelScope() as scope:
                started.set_result((portal, scope))
                try:
                    done.set_result(await function(*arguments))
                except Exception as error:
                    done.set_exception(error)

    thread = threading.Thread(target=anyio.run, args=(go,), name=THREAD, daemon=True)
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        portal, scope = started.result()
        portal.start_task_soon(scope.cancel)
        raise
    finally:
        thread.join(PATIENCE_S)


def run_inspection(
    function: Callable[[EnvSpec, int, Collection[str], CheckRun], Awaitable[None]],
    spec: EnvSpec,
    tasks: int,
    allow_writes: Collection[str],
    run: CheckRun,
) -> list[Finding]:
    """Run checks in a loop of their own; return their findings, and what was left open."""
    before = count_open()
    _run_isolated(function, spec, tasks, allow_writes, run)
    run.add(*check_leftovers(before))
    return run.findings
