"""The seconds that an inspection may take. What does not fit is a finding of its own: nothing was shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter

import anyio

from agentrl.inspection.finding import Finding, skip

Check = Callable[[], Awaitable[list[Finding]]]
Report = Callable[[Finding], None]


class Inspection:
    """Run checks one after another, tell each finding as it comes, and keep them all.

    Args:
        budget_s: wall-clock seconds for all checks together; ``None``: no limit. The check that is running when they
            have passed is stopped, later ones are not begun, and each is reported as skipped.
        on_finding: called with each finding as it comes, from the inspection's own thread.
        on_check: called with the name of each check as it begins, from that thread too.
    """

    def __init__(
        self,
        budget_s: float | None = None,
        on_finding: Report | None = None,
        on_check: Callable[[str], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.budget_s, self.on_finding, self.on_check, self._clock = budget_s, on_finding, on_check, clock
        self.findings: list[Finding] = []
        self._begun = clock()

    def left_s(self) -> float | None:
        return None if self.budget_s is None else self._begun + self.budget_s - self._clock()

    async def run(self, name: str, check: Check) -> None:
        """Run one check within what is left of the budget."""
        left_s = self.left_s()
        if left_s is not None and left_s <= 0:
            self.add(skip(name, f"not tried: the budget of {self.budget_s:g} s was spent; raise budget_s"))
            return
        if self.on_check is not None:
            self.on_check(name)
        found: list[Finding] = []
        with anyio.move_on_after(left_s) as scope:
            found = await check()
        if scope.cancelled_caught:
            found = [skip(name, f"stopped: the budget of {self.budget_s:g} s was spent; raise budget_s")]
        self.add(*found)

    def add(self, *findings: Finding) -> None:
        """Keep and tell findings."""
        for finding in findings:
            self.findings.append(finding)
            if self.on_finding is not None:
                self.on_finding(finding)
