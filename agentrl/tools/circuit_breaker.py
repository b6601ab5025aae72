"""A circuit breaker for each tool: one that fails again and again is not called for a while.

closed --- ``max_failures`` failures in a row ---> open --- ``cooldown_s`` later ---> one call tries: closed, or open
"""

from __future__ import annotations

from collections.abc import AsyncIterator
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
            self.failures = 0
            raise
        except Exception:
            self.failures += 1
            self._open_until = anyio.current_time() + self.cooldown_s
            raise
        else:
            self.failures = 0
        finally:
            self._probing = False


# One run is one event loop: a tool's breaker is shared by all environments of the run.
_breakers = anyio.lowlevel.RunVar[dict[str, CircuitBreaker]]("agentrl_tool_breakers")


def get_circuit_breaker(tool: str, max_failures: int, cooldown_s: float) -> CircuitBreaker:
    """Return the run's breaker of a tool, made at the first call."""
    try:
        breakers = _breakers.get()
    except LookupError:
        _breakers.set(breakers := {})
    return breakers.setdefault(tool, CircuitBreaker(tool, max_failures, cooldown_s))
