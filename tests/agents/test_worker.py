"""What a worker says of an agent's error: a line that is the same for the same mistake."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.agents.worker import _solve, describe_error

pytestmark = pytest.mark.anyio


def test_an_error_is_its_type_and_its_first_line() -> None:
    assert describe_error(ValueError("one\ntwo")) == "ValueError: one"
    assert describe_error(KeyError()) == "KeyError"
    assert len(describe_error(ValueError("x" * 1000))) < 250


async def test_a_cancellation_of_its_own_is_an_error_and_one_from_outside_is_none() -> None:
    answers = list[dict[str, Any]]()

    async def cancel_own(task: Any) -> None:
        inner = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        inner.cancel()
        await inner

    async def wait(task: Any) -> None:
        await asyncio.sleep(60)

    given: Any = None
    await _solve(cancel_own, given, 1, answers.append)
    cancelled = asyncio.create_task(_solve(wait, given, 2, answers.append))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert [answer["error"] for answer in answers] == ["CancelledError", ""]
