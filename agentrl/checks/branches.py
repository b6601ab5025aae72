"""The check of `Env.clone`: a clone continues as its trunk would, and shares no state with it (`rollout.branches`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from agentrl.checks.finding import Finding, fail, ok, skip
from agentrl.checks.harness import EpisodeHarness, find_difference
from agentrl.checks.untrained_policies import PolicyEngine, call_at_random
from agentrl.environments.env import Env
from agentrl.errors import UserError
from agentrl.rollout.episode import Branching
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, decode_text
from agentrl.types import Trajectory

WIDTH = 3  # episodes that one becomes
WAY_OUT = (
    "clone() shares something with its trunk, or leaves something out: `return copy.deepcopy(self)` copies what "
    "copy.copy(self) shares"
)


async def check_branches(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Play episodes that branch after their first turn; compare each branch with the same turns by themselves."""
    name = "branches"
    if harness.spec.cls.clone is Env.clone:
        return []
    shown = 0
    for task in tasks:
        try:
            group = await _branched(harness, task)
        except UserError as error:
            return [fail(name, str(error))]
        for branch in group:
            alone, again = [await _alone(harness, task, branch) for _ in range(2)]
            if find_difference(alone, again) is not None:
                continue  # it is not even the same as itself, which another check reports
            if (apart := _apart(branch, alone)) is not None:
                return [fail(name, f"a branch of task {task}, and the same turns by themselves, {apart}; {WAY_OUT}")]
            shown += branch.turns > 1 and branch.fault is None
    if not shown:
        return [skip(name, "nothing was shown: no episode came past the turn after which it would branch")]
    return [ok(name, f"{shown} branches came to what the same turns come to by themselves")]


def _apart(branch: Trajectory, alone: Trajectory) -> str | None:
    """Return how a branch differs from its turns by themselves; a machine that is too slow is nobody's fault."""
    fault = branch.fault
    if fault is not None and alone.fault is None and "timeout" not in fault.kind:
        return f"differ in a fault ({fault.kind}): {fault.message.strip().splitlines()[-1]}"
    part = find_difference(branch, alone)
    return f"differ in {part}" if part is not None else None


async def _branched(harness: EpisodeHarness, task: int) -> Sequence[Trajectory]:
    player = PolicyEngine(call_at_random, harness.tools)
    rollout = Rollout(harness.spec, player, ByteRenderer(), harness.limits, branching=Branching(1, WIDTH))
    return (await rollout.group(task, WIDTH, seed=task)).trajectories


async def _alone(harness: EpisodeHarness, task: int, branch: Trajectory) -> Trajectory:
    """Play a task with the turns of an earlier episode."""
    script = [decode_text(s.token_ids) for s in branch.segments if s.author == "model"]
    turns = count()
    engine = ScriptedEngine(lambda session, turn: script[min(next(turns), len(script) - 1)])
    return await Rollout(harness.spec, engine, ByteRenderer(), harness.limits).episode(task)
