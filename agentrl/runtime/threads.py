"""Work beside the event loop's own: sync functions in threads, and deadlines that hold for whoever ignores them."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import start_blocking_portal
from anyio.lowlevel import RunVar

from agentrl.errors import InfraError, is_failure

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
        return
    except BaseExceptionGroup as group:  # with a callback's sys.exit in it, say
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
    raise first  # here the group is not its context: IPython prints such errors to stderr, and runs the next cell


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
            _fulfil(future, context, function)
        finally:
            with suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(slots.release)

    threading.Thread(target=work, name="agentrl function", daemon=True).start()
    return await asyncio.wrap_future(future)


@asynccontextmanager
async def enter_in_thread(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a plain context manager in threads."""
    value = await run_in_thread(context.__enter__)
    try:
        yield value
    except BaseException as error:
        if not await run_in_thread(partial(context.__exit__, type(error), error, error.__traceback__)):
            raise
    else:
        await run_in_thread(partial(context.__exit__, None, None, None))


def _fulfil(future: Future[T], context: contextvars.Context, function: Callable[[], T]) -> None:
    """Call a function, and give its result, or what it raises, to whoever awaits the future."""
    try:
        future.set_result(context.run(function))
    except StopIteration as error:  # no future takes one: whoever awaits it would wait for ever
        future.set_exception(RuntimeError(f"it raised {error!r}"))
    except BaseException as error:
        future.set_exception(error)


class SerialThread:
    """A thread that calls functions one after the other, begun at the first call: for what belongs to one thread.

    A call that nobody waits for any more runs on, as a thread cannot be interrupted; after it nothing else is called.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self.abandoned = False  # a call was given up while it ran

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the thread; once the thread has ended, in another one.

        Raises:
            InfraError: ``thread_abandoned``, a call before was given up and may still run.
        """
        if self.abandoned:
            raise InfraError("thread_abandoned", "a call before was given up and may still run in its thread")
        if self._ended:
            return await run_in_thread(function)
        future = Future[T]()
        self._calls.put(partial(_fulfil_unless_cancelled, future, contextvars.copy_context(), function))
        if self._thread is None:
            self._thread = threading.Thread(target=_call_each, args=(self._calls,), name="agentrl calls", daemon=True)
            self._thread.start()
        try:
            return await asyncio.wrap_future(future)
        finally:
            self.abandoned = future.running()

    def end(self) -> None:
        """End the thread after the calls that were made."""
        self._ended = True
        self._calls.put(None)


def _fulfil_unless_cancelled(future: Future[T], context: contextvars.Context, function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        _fulfil(future, context, function)


def _call_each(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
