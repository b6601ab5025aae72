"""Running an event loop where there may be one already."""

import asyncio
import threading

import pytest

from agentrl.runtime import threads


async def where(word: str) -> tuple[str, threading.Thread]:
    await asyncio.sleep(0)
    return word, threading.current_thread()


def test_a_loop_is_run_here_where_none_is() -> None:
    assert threads.run_sync(where, "a") == ("a", threading.current_thread())


def test_in_a_notebook_it_runs_in_a_thread_of_its_own() -> None:
    async def cell() -> tuple[str, threading.Thread]:
        return threads.run_sync(where, "b")

    word, thread = asyncio.run(cell())
    assert word == "b"
    assert thread is not threading.current_thread()


def test_what_it_raises_is_raised() -> None:
    async def cell() -> None:
        threads.run_sync(asyncio.wait_for, asyncio.sleep(5), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(cell())


async def test_a_task_s_exception_has_no_group_in_its_context() -> None:
    """IPython prints an error that has one to stderr, reports none, and runs the next cell."""

    async def fail() -> None:
        async with threads.open_task_group() as inner:
            inner.start_soon(asyncio.wait_for, asyncio.sleep(5), 0.01)

    with pytest.raises(TimeoutError) as raised:
        async with threads.open_task_group() as tasks:
            tasks.start_soon(fail)
    error: BaseException | None = raised.value
    while error is not None:
        assert not isinstance(error, BaseExceptionGroup)
        error = error.__context__


async def test_so_many_threads_at_once_and_a_hung_one_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "THREADS", 3)
    now, most, over = 0, 0, threading.Event()
    lock = threading.Lock()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        over.wait(0.02)
        with lock:
            now -= 1

    await asyncio.gather(*(threads.run_in_thread(work) for _ in range(12)))
    assert most == 3
    hung = threading.Event()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.run_in_thread(hung.wait), 0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(threads.run_in_thread(work), 0.05)
    hung.set()
    await asyncio.wait_for(threads.run_in_thread(work), 5)
