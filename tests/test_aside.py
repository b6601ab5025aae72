"""Running an event loop where there may be one already."""

import asyncio
import threading

import pytest

from agentrl import aside


async def where(word: str) -> tuple[str, threading.Thread]:
    await asyncio.sleep(0)
    return word, threading.current_thread()


def test_a_loop_is_run_here_where_none_is() -> None:
    assert aside.run(where, "a") == ("a", threading.current_thread())


def test_in_a_notebook_it_runs_in_a_thread_of_its_own() -> None:
    async def cell() -> tuple[str, threading.Thread]:
        return aside.run(where, "b")

    word, thread = asyncio.run(cell())
    assert word == "b"
    assert thread is not threading.current_thread()


def test_what_it_raises_is_raised() -> None:
    async def cell() -> None:
        aside.run(asyncio.wait_for, asyncio.sleep(5), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(cell())
