"""Limits and breakers of tools hold over all players."""

from __future__ import annotations

import pytest

from agentrl.players.shared_tools import ToolLimits, describe_breaker, set_breaker, share_tools
from agentrl.tools.call import call_tool
from agentrl.tools.circuit_breaker import get_circuit_breaker
from agentrl.tools.tool import tool

pytestmark = pytest.mark.anyio


def test_calls_in_progress_are_limited_over_all_players_first_come_first_served() -> None:
    limits, granted = ToolLimits(), []
    for player in (1, 2, 3, 1):
        limits.acquire("search", 2, player, lambda player=player: granted.append(player))  # type: ignore[misc]
    assert granted == [1, 2]
    limits.release("search", 2)
    assert granted == [1, 2, 3]
    limits.release("search", 2)  # it has none any more
    assert granted == [1, 2, 3]
    limits.acquire("other", 1, 9, lambda: granted.append(9))
    assert granted == [1, 2, 3, 9]


def test_who_is_gone_gives_its_calls_back_and_waits_for_none() -> None:
    limits, granted = ToolLimits(), []
    for player in (1, 1, 2, 1, 3):
        limits.acquire("search", 2, player, lambda player=player: granted.append(player))  # type: ignore[misc]
    limits.drop_player(1)
    assert granted == [1, 1, 2, 3]


class _Said:
    def __init__(self) -> None:
        self.frames: list[tuple[str, object]] = []

    def send(self, kind: str, **fields: object) -> None:
        self.frames.append((kind, fields))


@tool(max_concurrency=1, max_consecutive_failures=2, retries=0)
async def flaky(fail: bool) -> str:
    """Fail if it is told to.

    Args:
        fail: whether to.
    """
    if fail:
        raise OSError("down")
    return "ok"


async def test_a_call_asks_for_its_turn_and_an_open_breaker_is_told() -> None:
    said, asked = _Said(), []

    async def ask(kind: str, **fields: object) -> object:
        asked.append((kind, fields))
        return None

    share_tools(said, ask)  # type: ignore[arg-type]
    assert await call_tool(flaky, {"fail": False}) == "ok"
    assert asked == [("acquire", {"tool": "flaky", "limit": 1})]
    assert said.frames == [("release", {"tool": "flaky"})]
    for _ in range(2):
        with pytest.raises(Exception, match="down"):
            await call_tool(flaky, {"fail": True})
    (told,) = [fields for kind, fields in said.frames if kind == "breaker"]
    assert told == {"tool": "flaky", "max_failures": 2, "cooldown_s": flaky.cooldown_s, "failures": 2}


async def test_a_breaker_that_opened_elsewhere_is_open_here_and_closes_with_it() -> None:
    breaker = get_circuit_breaker("elsewhere", 3, 60.0)
    told = describe_breaker(breaker)
    set_breaker({**told, "failures": 3})
    with pytest.raises(Exception, match="failed 3 times in a row"):
        async with breaker.guard():
            pass
    set_breaker({**told, "failures": 0})
    async with breaker.guard():
        pass
