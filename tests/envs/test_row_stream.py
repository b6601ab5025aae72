"""Rows of a stream: read once in order, a little ahead, and the same row for the same number."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import pytest
from agentrl_envs import row_stream
from agentrl_envs.dataset import Row
from agentrl_envs.row_stream import AHEAD, RowStream
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import InfraError, UserError


class Source:
    """Counts what is read of it."""

    def __init__(self, size: int | None, fail_at: int | None = None) -> None:
        self.size, self.fail_at, self.read, self.begun = size, fail_at, 0, 0
        self.failures = 2

    def __call__(self) -> Iterator[Row]:
        self.begun += 1
        number = 0
        while self.size is None or number < self.size:
            if number == self.fail_at:
                self.failures -= 1
                self.fail_at = number if self.failures else None
                raise ConnectionError("the line is cut")
            self.read += 1
            yield {"n": number}
            number += 1


async def numbers(stream: RowStream, *asked: int) -> list[int]:
    return [(await stream.row(k))["n"] for k in asked]


async def test_a_stream_that_ends_begins_anew() -> None:
    stream = RowStream(Source(3))
    try:
        assert await numbers(stream, 0, 1, 2, 3, 4, 8) == [0, 1, 2, 0, 1, 2]
    finally:
        await stream.close()


async def test_it_reads_a_little_ahead_and_no_further() -> None:
    source = Source(None)
    stream = RowStream(source)
    try:
        assert await numbers(stream, 10) == [10]
        await anyio.sleep(0.05)
        assert source.read <= 10 + AHEAD + 2
    finally:
        await stream.close()


async def test_it_keeps_the_newest_rows_and_reads_an_older_one_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_stream, "KEPT", 8)
    monkeypatch.setattr(row_stream, "AHEAD", 2)
    source = Source(None)
    stream = RowStream(source, buffer=4, seed=1)
    try:
        first = await numbers(stream, *range(40))
        assert len(stream._rows) <= 8
        assert await numbers(stream, 3, 20, 39) == [first[3], first[20], first[39]]
        assert source.begun == 3
    finally:
        await stream.close()


@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_each_epoch_is_a_permutation_of_its_own_and_the_same_each_time(size: int, buffer: int, seed: int) -> None:
    async def take(*asked: int) -> list[int]:
        stream = RowStream(Source(size), buffer, seed)
        try:
            return await numbers(stream, *asked)
        finally:
            await stream.close()

    rows = anyio.run(take, *range(2 * size))
    assert sorted(rows[:size]) == sorted(rows[size:]) == list(range(size))
    assert anyio.run(take, *range(size, 2 * size)) == rows[size:]  # a resumed run skips what was played
    if buffer < 2:
        assert rows == [*range(size)] * 2
    assert all(number <= place + buffer for place, number in enumerate(rows[:size]))  # no row comes early by more


async def test_all_episodes_of_a_group_wait_for_one_row() -> None:
    gate = threading.Event()

    def slow() -> Iterator[Row]:
        yield {"n": 0}
        gate.wait(60)
        yield {"n": 1}

    stream, got = RowStream(slow), list[int]()

    async def one() -> None:
        got.append((await stream.row(1))["n"])

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(one)
            await anyio.sleep(0.01)
            assert await numbers(stream, 0) == [0]
            gate.set()
    finally:
        gate.set()
        await stream.close()
    assert got == [1, 1, 1, 1]


async def test_a_stream_that_breaks_is_a_fault_and_is_tried_again_where_it_broke() -> None:
    stream = RowStream(Source(20, fail_at=5))
    try:
        assert await numbers(stream, 4) == [4]
        with pytest.raises(InfraError, match=r"the dataset cannot be read: ConnectionError.*the line is cut") as raised:
            await stream.row(6)
        assert raised.value.kind == "stream"
        assert await numbers(stream, 6, 5) == [6, 5]
    finally:
        await stream.close()


async def test_a_stream_of_nothing_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"the stream of env\.data has no rows to train on"):
        await RowStream(Source(0)).row(0)


async def test_whoever_waits_for_a_closed_stream_is_told() -> None:
    gate = threading.Event()

    def never() -> Iterator[Row]:
        gate.wait(60)
        yield from ()

    stream = RowStream(never)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_closed, stream)
        await anyio.sleep(0.01)
        threading.Timer(0.05, gate.set).start()
        await stream.close()


async def _closed(stream: RowStream) -> None:
    with pytest.raises(InfraError, match="the dataset is closed"):
        await stream.row(0)
