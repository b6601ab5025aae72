"""Work beside the event loop's own: sync functions in threads, and deadlines that hold for whoever ignores them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import start_blocking_portal
from anyio.lowlevel import RunVar

T = TypeVar("T")
GRACE_S = 1.0  # to clean up after a deadline
THREADS = 128


class Overdue(Exception):
    """The deadline passed. Not a TimeoutError: the work itself may raise one."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, in a task of its own: one that does not end when it is cancelled is left behind.

    Raises:
        Overdue: it took longer.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody may be left to read it
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise Overdue
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task}, timeout=GRACE_S)


def run(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run an event loop; in a thread of its own where one runs here already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(function, *arguments)
    with start_blocking_portal() as portal:
        return portal.call(function, *arguments)


@asynccontextmanager
async def together() -> AsyncIterator[TaskGroup]:
    """A task group that raises what the first of its tasks raised, which cancelled the others."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except ExceptionGroup as group:
        first: Exception = group
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__


# One run is one event loop. A thread that nobody waits for any more holds its place until it ends.
_places = RunVar[asyncio.Semaphore]("agentrl_threads")


async def in_thread(function: Callable[[], T]) -> T:
    """Call a sync function off the event loop, ``THREADS`` of them at once.

    A cancelled caller does not wait for it, nor does the process's end.
    """
    try:
        places = _places.get()
    except LookupError:
        _places.set(places := asyncio.Semaphore(THREADS))
    await places.acquire()
    loop, future = asyncio.get_running_loop(), Future[T]()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)
        finally:
            with suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(places.release)

    threading.Thread(target=work, name="agentrl function", daemon=True).start()
    return await asyncio.wrap_future(future)
