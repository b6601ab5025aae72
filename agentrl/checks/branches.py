"""Is a clone the environment that it is a clone of, and a world of its own? (`rollout.branches`)"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from agentrl.env import Env
from agentrl.episode import Branching
from agentrl.errors import UserError
from agentrl.inspection.finding import Finding, fail, ok, skip
from agentrl.inspection.plays import Plays, difference
from agentrl.inspection.policies import Player, calls
from agentrl.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, text_of
from agentrl.types import Trajectory

WIDTH = 3  # episodes that one becomes
WAY_OUT = (
    "clone() shares something with its trunk, or leaves something out: `return copy.deepcopy(self)` copies what "
    "copy.copy(self) shares"
)


async def branches(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """Play episodes that branch after their first turn; what each said is said again in an episode by itself."""
    name = "branches"
    if plays.spec.cls.clone is Env.clone:
        return []
    shown = 0
    for task in tasks:
        try:
            group = await _branched(plays, task)
        except UserError as error:
            return [fail(name, str(error))]
        for branch in group:
            alone, again = [await _alone(plays, task, branch) for _ in range(2)]
            if difference(alone, again) is not None:
                continue  # it is not even the same as itself, which is said elsewhere
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
    part = difference(branch, alone)
    return f"differ in {part}" if part is not None else None


async def _branched(plays: Plays, task: int) -> Sequence[Trajectory]:
    player = Player(calls, plays.tools)
    rollout = Rollout(plays.spec, player, ByteRenderer(), plays.limits, branching=Branching(1, WIDTH))
    return (await rollout.group(task, WIDTH, seed=task)).trajectories


async def _alone(plays: Plays, task: int, branch: Trajectory) -> Trajectory:
    """Play a task with the turns of an episode that was played before."""
    said = [text_of(s.token_ids) for s in branch.segments if s.author == "model"]
    turns = count()
    engine = ScriptedEngine(lambda session, turn: said[min(next(turns), len(said) - 1)])
    return await Rollout(plays.spec, engine, ByteRenderer(), plays.limits).episode(task)
