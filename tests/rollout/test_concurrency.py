"""As many episodes as keep the engine full, first come, first served."""

from __future__ import annotations

import anyio
import pytest

from agentrl.rollout.concurrency import SLACK, ConcurrencyLimiter


async def test_slow_tools_let_more_in() -> None:
    limiter = ConcurrencyLimiter(8)
    assert limiter.limit == 8 * SLACK
    limiter.record_turn(0.1, 0.3)
    assert limiter.limit == 8 * 4 * SLACK
    for _ in range(1000):
        limiter.record_turn(0.1, 0.1)
    assert limiter.limit == pytest.approx(8 * 2 * SLACK, abs=1)


async def test_turns_alike_count_as_so_many_turns() -> None:
    one, many = ConcurrencyLimiter(8), ConcurrencyLimiter(8)
    for limiter in (one, many):
        limiter.record_turn(0.1, 0.9)
    for _ in range(37):
        one.record_turn(0.2, 0.1)
    many.record_turn(0.2, 0.1, 37)
    assert many.limit == one.limit < 8 * 10 * SLACK


async def test_nobody_is_let_in_over_the_limit_and_the_first_come_first() -> None:
    limiter, order, most = ConcurrencyLimiter(2), [], 0

    async def episode(number: int) -> None:
        nonlocal most
        async with limiter.slot():
            order.append(number)
            most = max(most, limiter.running)
            await anyio.sleep(0.002 * (number % 3))

    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(episode, number)
    assert order == list(range(40))
    assert most <= limiter.limit == 3
    assert limiter.running == 0


async def test_who_is_cancelled_gives_the_place_on() -> None:
    limiter = ConcurrencyLimiter(1)
    limit = limiter.limit
    async with anyio.create_task_group() as tasks:
        held = [limiter.slot() for _ in range(limit)]
        for place in held:
            await place.__aenter__()
        entered: list[int] = []

        async def wait(number: int) -> None:
            async with limiter.slot():
                entered.append(number)

        with anyio.move_on_after(0.02):
            await wait(0)
        tasks.start_soon(wait, 1)
        await anyio.sleep(0.01)
        assert not entered
        await held[0].__aexit__(None, None, None)
        await anyio.sleep(0.01)
        assert entered == [1]
        for place in held[1:]:
            await place.__aexit__(None, None, None)
    assert limiter.running == 0
