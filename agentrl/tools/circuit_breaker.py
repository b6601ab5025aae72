"""A circuit breaker for each tool: one that fails again and again is not called for a while.

closed --- ``max_failures`` failures in a row ---> open --- ``cooldown_s`` later ---> one call tries: closed, or open
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from agentrl.errors import InfraError, ToolError, UserError

OPEN = "tool_open"  # the kind of the fault while a tool is not called


@dataclass
class CircuitBreaker:
    """A count of the failures of a tool in a row, over all episodes of a run."""

    tool: str
    max_failures: int
    cooldown_s: float
    failures: int = 0
    on_change: Callable[[CircuitBreaker], None] = lambda breaker: None  # called as it opens, and as it closes
    _open_until: float = 0.0
    _probing: bool = False

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Allow one call of the tool and count its outcome.

        Raises:
            InfraError: ``tool_open``, at once, while the tool is not called.
        """
        if self.failures >= self.max_failures and (anyio.current_time() < self._open_until or self._probing):
            raise InfraError(
                OPEN,
                f"tool {self.tool!r} failed {self.failures} times in a row; not called again for {self.cooldown_s:g} s",
            )
        self._probing = self.failures >= self.max_failures
        try:
            yield
        except (ToolError, UserError):
            self._close()
            raise
        except Exception:
            self.count_failures(self.failures + 1)
            if self.failures >= self.max_failures:
                self.on_change(self)
            raise
        else:
            self._close()
        finally:
            self._probing = False

    def count_failures(self, failures: int) -> None:
        """Take so many failures in a row, the last one now; 0 closes it."""
        self.failures = failures
        self._open_until = anyio.current_time() + self.cooldown_s

    def _close(self) -> None:
        was_open, self.failures = self.failures >= self.max_failures, 0
        if was_open:
            self.on_change(self)


# One run is one event loop: a tool's breaker is shared by all environments of the run.
_breakers = anyio.lowlevel.RunVar[dict[str, CircuitBreaker]]("agentrl_tool_breakers")


def get_circuit_breaker(tool: str, max_failures: int, cooldown_s: float) -> CircuitBreaker:
    """Return the run's breaker of a tool, made at the first call."""
    try:
        breakers = _breakers.get()
    except LookupError:
        _breakers.set(breakers := {})
    if tool not in breakers:
        breakers[tool] = CircuitBreaker(tool, max_failures, cooldown_s)
        if (listener := _listener.get(None)) is not None:
            breakers[tool].on_change = listener
    return breakers[tool]


# Of a process that has a part of a run's episodes: what tells the others that a breaker opened or closed.
_listener = anyio.lowlevel.RunVar[Callable[[CircuitBreaker], None] | None]("agentrl_breaker_listener")


def share_breakers(listener: Callable[[CircuitBreaker], None]) -> None:
    """Call ``listener`` from here on, in this event loop, whenever a breaker opens or closes."""
    _listener.set(listener)
