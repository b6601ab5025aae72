"""A run of checks within a budget of seconds. A check that does not fit is reported as skipped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter

import anyio

from agentrl.checks.finding import Finding, skip

Check = Callable[[], Awaitable[list[Finding]]]
FindingCallback = Callable[[Finding], None]


class CheckRun:
    """A run of checks, one after another: reports each finding as it comes, and keeps them all.

    Args:
        budget_s: wall-clock seconds for all checks together; ``None``: no limit. The check that is running when they
            have passed is stopped, later ones are not begun, and each is reported as skipped.
        on_finding: called with each finding as it comes, from the thread of the checks.
        on_check: called with the name of each check as it starts, from that thread too.
    """

    def __init__(
        self,
        budget_s: float | None = None,
        on_finding: FindingCallback | None = None,
        on_check: Callable[[str], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.budget_s, self.on_finding, self.on_check, self._clock = budget_s, on_finding, on_check, clock
        self.findings: list[Finding] = []
        self._started = clock()

    def _remaining_s(self) -> float | None:
        return None if self.budget_s is None else self._started + self.budget_s - self._clock()

    async def run(self, name: str, check: Check) -> None:
        """Run one check within what is left of the budget."""
        left_s = self._remaining_s()
        if left_s is not None and left_s <= 0:
            self.add(skip(name, f"not tried: the budget of {self.budget_s:g} s was spent; raise budget_s"))
            return
        if self.on_check is not None:
            self.on_check(name)
        findings: list[Finding] = []
        with anyio.move_on_after(left_s) as scope:
            findings = await check()
        if scope.cancelled_caught:
            findings = [skip(name, f"stopped: the budget of {self.budget_s:g} s was spent; raise budget_s")]
        self.add(*findings)

    def add(self, *findings: Finding) -> None:
        """Keep findings, and report them to ``on_finding``."""
        for finding in findings:
            self.findings.append(finding)
            if self.on_finding is not None:
                self.on_finding(finding)
