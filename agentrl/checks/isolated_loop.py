"""An event loop in a thread of its own: the caller's functions are not on its stack, and it may be left behind."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

T = TypeVar("T")
THREAD = "agentrl inspection"
PATIENCE_S = 5.0  # for the loop to end: tasks that cannot be cancelled would hold it for ever


def run(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """What the function returns, or raises. Ctrl-C cancels it."""
    done, begun = Future[T](), Future[tuple[BlockingPortal, anyio.CancelScope]]()

    async def go() -> None:
        async with BlockingPortal() as portal:
            with anyio.CancelScope() as scope:
                begun.set_result((portal, scope))
                try:
                    done.set_result(await function(*arguments))
                except Exception as error:
                    done.set_exception(error)

    thread = threading.Thread(target=anyio.run, args=(go,), name=THREAD, daemon=True)
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        portal, scope = begun.result()
        portal.start_task_soon(scope.cancel)
        raise
    finally:
        thread.join(PATIENCE_S)
