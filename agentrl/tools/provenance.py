"""The provenance of a failed call: its own request's doing, or the world's.

A call that an infrastructure error ended is *provoked* where the tool works otherwise. The evidence, in this order:

    the tool has a health check    it passes: provoked; it fails: the world's
    other episodes' calls          one succeeded before, and not yet ``DOWN`` others failed since: provoked
    nothing is known               the world's

The model reads of a provoked failure as of any refusal, and the episode goes on: there is nothing to be gained by it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from agentrl.errors import InfraError, ToolError
from agentrl.runtime.threads import DeadlineExceeded, contain_exits, with_deadline

DOWN = 8  # episodes that failed in a row, none succeeding in between: the world is down
CHECK_S = 10.0  # the longest health check
HealthCheck = Callable[[], Awaitable[object]]  # raises where the world does not work


@dataclass
class HealthProbe:
    """Runs a health check, once for all who ask while it waits."""

    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _begun: float = -math.inf
    _healthy: bool = False

    async def passes(self, check: HealthCheck) -> bool:
        """Return True if a check that begins from now on passes within ``CHECK_S``."""
        asked = anyio.current_time()
        async with self._lock:
            if self._begun < asked:
                self._begun = anyio.current_time()
                self._healthy = await _run_check(check)
            return self._healthy


async def _run_check(check: HealthCheck) -> bool:
    async def run() -> None:
        await check()

    try:
        await with_deadline(CHECK_S, contain_exits(run()))
    except (Exception, DeadlineExceeded):  # it is the author's code, or a tool's
        return False
    return True


@dataclass
class CallHistory:
    """The outcomes of a tool's calls, over all episodes of a run."""

    probe: HealthProbe = field(default_factory=HealthProbe)
    _succeeded: set[int] = field(default_factory=set)  # two episodes at most
    _failing: set[int] = field(default_factory=set)  # episodes that failed since the last success

    def record(self, episode: int, *, succeeded: bool) -> None:
        """Record how a call of an episode ended; a refusal of the tool's is a success: it works."""
        if not succeeded:
            self._failing.add(episode)
            return
        self._failing.clear()
        if len(self._succeeded) < 2:
            self._succeeded.add(episode)

    def works_for_others(self, episode: int) -> bool:
        """Return True if another episode's call succeeded, and not too many others have failed since."""
        return bool(self._succeeded - {episode}) and len(self._failing - {episode}) < DOWN

    async def is_provoked(self, fault: InfraError, episode: int, check: HealthCheck | None) -> bool:
        """Return True if the request of a failed call is at fault.

        Args:
            check: the tool's health check, if it has one.
        """
        if fault.provoked is not None:
            return fault.provoked
        return self.works_for_others(episode) if check is None else await self.probe.passes(check)


# One run is one event loop: a tool's history is that of all environments of the run.
_histories = anyio.lowlevel.RunVar[dict[str, CallHistory]]("agentrl_call_histories")


def get_call_history(tool: str) -> CallHistory:
    """Return the run's history of a tool's calls, made at the first one."""
    try:
        histories = _histories.get()
    except LookupError:
        _histories.set(histories := {})
    return histories.setdefault(tool, CallHistory())


def describe_provoked(tool: str, fault: InfraError) -> ToolError:
    """Make the refusal that the model reads; of the fault's own words, which may name what is ours, only a time-out."""
    why = str(fault) if fault.kind == "tool_timeout" else f"tool {tool!r} failed on this request ({fault.kind})"
    return ToolError(why, kind="provoked")
