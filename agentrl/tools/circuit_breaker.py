"""A circuit breaker for each tool: one that fails again and again is left alone for a while.

closed --- ``threshold`` faults in a row ---> open --- ``rest_s`` later ---> one call tries: closed again, or open again
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from agentrl.errors import ToolError, UserError, WorldFault


@dataclass
class Breaker:
    """Counts the faults of a tool in a row, over all episodes of a run."""

    tool: str
    threshold: int
    rest_s: float
    failed: int = 0
    _until: float = 0.0
    _trying: bool = False

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Inside, the tool is called. Raises WorldFault at once while the tool is left alone."""
        now = anyio.current_time()
        if self.failed >= self.threshold and (now < self._until or self._trying):
            raise WorldFault("tool_open", f"tool {self.tool!r} failed {self.failed} times in a row, and is left alone")
        self._trying = self.failed >= self.threshold
        try:
            yield
        except (ToolError, UserError):
            self.failed = 0
            raise
        except Exception:
            self.failed += 1
            self._until = anyio.current_time() + self.rest_s
            raise
        else:
            self.failed = 0
        finally:
            self._trying = False


# One run is one event loop: a tool's breaker is shared by all environments of the run.
_breakers = anyio.lowlevel.RunVar[dict[str, Breaker]]("agentrl_tool_breakers")


def breaker_of(tool: str, threshold: int, rest_s: float) -> Breaker:
    try:
        breakers = _breakers.get()
    except LookupError:
        _breakers.set(breakers := {})
    return breakers.setdefault(tool, Breaker(tool, threshold, rest_s))
