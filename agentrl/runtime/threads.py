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

from agentrl.errors import is_failure

T = TypeVar("T")
GRACE_S = 1.0  # to clean up after a deadline
THREADS = 128


class DeadlineExceeded(Exception):
    """The deadline passed. Not a TimeoutError: the work itself may raise one."""


async def with_deadline(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, in a task of its own, which is left behind if it ignores its cancellation.

    Raises:
        DeadlineExceeded: it took longer than ``seconds``.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody may be left to read it
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise DeadlineExceeded
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task}, timeout=GRACE_S)


async def contain_exits(work: Awaitable[T]) -> T:
    """Return the result of `work`. A SystemExit, which would end the event loop from within a task, is a RuntimeError.

    So is any other exception of somebody else's code that is no Exception, but for Ctrl-C and a cancellation.
    """
    try:
        return await work
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise RuntimeError(f"it raised {error!r}") from None


def run_sync(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run an event loop; in a thread of its own where one runs here already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(function, *arguments)
    with start_blocking_portal() as portal:
        return portal.call(function, *arguments)


@asynccontextmanager
async def open_task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group. If a task fails, cancel the others and raise its exception, not an ExceptionGroup."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except ExceptionGroup as group:
        first: Exception = group
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__


# One run is one event loop. A thread that nobody waits for any more holds its slot until it ends.
_thread_slots = RunVar[asyncio.Semaphore]("agentrl_threads")


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call a sync function off the event loop, ``THREADS`` of them at once.

    A cancelled caller does not wait for it, nor does the process's end.
    """
    try:
        slots = _thread_slots.get()
    except LookupError:
        _thread_slots.set(slots := asyncio.Semaphore(THREADS))
    await slots.acquire()
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
                loop.call_soon_threadsafe(slots.release)

    threading.Thread(target=work, name="agentrl function", daemon=True).start()
    return await asyncio.wrap_future(future)
