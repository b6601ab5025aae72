"""Tools that players share: ``max_concurrency`` holds over all players of a run, and so do circuit breakers.

The controller grants each call of a tool that has a limit; who is gone has its calls taken back. A circuit breaker that
opens in one player opens in the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from agentrl.players.connection import Fields, FrameStream, PlayerFrame
from agentrl.tools.call import share_limits
from agentrl.tools.circuit_breaker import CircuitBreaker, get_circuit_breaker, share_breakers

Grant = Callable[[], None]  # tells a player that its call may begin


class ToolLimits:
    """The calls in progress of each tool that has a limit, over all players. First come, first served."""

    def __init__(self) -> None:
        self._running: dict[str, Counter[int]] = defaultdict(Counter)  # by tool and player
        self._waiting: dict[str, deque[tuple[int, Grant]]] = defaultdict(deque)
        self._limits: dict[str, int] = {}

    def acquire(self, tool: str, limit: int, player: int, grant: Grant) -> None:
        """Call ``grant`` once the player may begin a call: now, or when another call has ended."""
        self._limits[tool] = limit
        self._waiting[tool].append((player, grant))
        self._grant(tool)

    def release(self, tool: str, player: int) -> None:
        """Count a call as ended."""
        if self._running[tool][player] > 0:
            self._running[tool][player] -= 1
        self._grant(tool)

    def drop_player(self, player: int) -> None:
        """Take back the calls of a player that is gone, and those that it waits for."""
        for tool in list(self._limits):
            self._running[tool].pop(player, None)
            self._waiting[tool] = deque(w for w in self._waiting[tool] if w[0] != player)
            self._grant(tool)

    def _grant(self, tool: str) -> None:
        running, waiting = self._running[tool], self._waiting[tool]
        while waiting and running.total() < self._limits[tool]:
            player, grant = waiting.popleft()
            running[player] += 1
            grant()


def share_tools(connection: FrameStream, ask: Callable[..., Awaitable[PlayerFrame]]) -> None:
    """Let the tools of this player share their limits and breakers with the others'."""

    @asynccontextmanager
    async def hold(tool: str, limit: int) -> AsyncIterator[None]:
        await ask("acquire", tool=tool, limit=limit)
        try:
            yield
        finally:
            connection.send("release", tool=tool)

    def make(tool: str, limit: int) -> AbstractAsyncContextManager[None]:
        return hold(tool, limit)

    def tell(breaker: CircuitBreaker) -> None:
        connection.send("breaker", **describe_breaker(breaker))

    share_limits(make)
    share_breakers(tell)


def describe_breaker(breaker: CircuitBreaker) -> Fields:
    """Describe a breaker as JSON can hold it."""
    return {
        "tool": breaker.tool,
        "max_failures": breaker.max_failures,
        "cooldown_s": breaker.cooldown_s,
        "failures": breaker.failures,
    }


def set_breaker(described: Fields) -> None:
    """Open or close a breaker as another player has."""
    breaker = get_circuit_breaker(described["tool"], described["max_failures"], described["cooldown_s"])
    breaker.count_failures(described["failures"])
