"""Does a seed give its task, and another seed another one? Is no test task one that is trained?"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence

from agentrl.inspection import elsewhere
from agentrl.inspection.apart import tried
from agentrl.inspection.finding import Finding, fail, ok, skip, warn
from agentrl.inspection.plays import Plays, course, global_dice
from agentrl.inspection.policies import IDLE, calls

SEED = "same-seed"
AGAIN = (
    "a second time",
    "nothing of a task may come from time, uuid or os.urandom, or from what earlier episodes left behind",
)
DICE = (
    "while Python's or numpy's own generator stood elsewhere",
    "draw from random.Random(seed), not from random itself",
)
BESIDE = (
    "beside other episodes",
    "keep what belongs to an episode on self, and nothing of it on the class or the module",
)
AFTER = ("after other episodes had been played", BESIDE[1])


async def begins(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """Return a finding if no task begins at all: what ``reset`` raised."""
    await plays.openings(tasks)
    raised = [t.fault for t in plays.played if t.fault is not None and t.fault.kind == "env_reset"]
    if len(raised) < len(tasks) or not raised:
        return []
    lines = raised[0].message.strip().splitlines()
    return [fail("begins", f"{lines[0].removesuffix(': Traceback (most recent call last):')} raised {lines[-1]:.300}")]


async def repeats(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """Fresh environments, in other orders, with other dice, beside and after others."""
    first = await plays.openings(tasks)
    for when, dice, together in ((AGAIN, 0, False), (DICE, 1, False), (BESIDE, 0, True), (AFTER, 0, False)):
        if when is AFTER:
            await plays.play(calls, tasks)
        order = -1 if when is AFTER else 1
        found = await plays.openings(tasks[::order], dice=dice, together=together)
        for task, one, other in zip(tasks, first, found[::order], strict=True):
            if one != other:
                return [fail(SEED, f"reset(seed={task}) began with {_apart(one, other)} {when[0]}; {when[1]}")]
    return [ok(SEED, f"{len(tasks)} seeds gave the same task each time: again, in any order, beside and after others")]


async def repeats_elsewhere(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """In other processes, with other hash seeds."""
    name = "same-seed-elsewhere"
    if (asked := elsewhere.question(plays.spec, tasks)) is None:
        why = "another process cannot make it: its class is inside a function or script, or a setting is an object"
        return [skip(name, f"not tried: {why}")]
    here = await plays.openings(tasks)
    found = await elsewhere.openings(asked)
    if isinstance(found, str):
        return [fail(name, f"it cannot be opened and reset in another process: {found}")]
    for other in found:
        for task, one, there in zip(tasks, here, other, strict=True):
            if one != there:
                way_out = "nothing may hang on the order of a set, on hash() of text, or on id(); sort first"
                return [fail(name, f"reset(seed={task}) began with {_apart(one, there)} in another process; {way_out}")]
    return [ok(name, f"the same tasks in {len(found)} other processes, each with another PYTHONHASHSEED")]


def _apart(one: str, other: str) -> str:
    """Two texts, from a little before they part."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(at - 20, 0)
    return f"{one[start : start + 60]!r}, and with {other[start : start + 60]!r}"


async def seeds_used(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """Other seeds are other tasks."""
    name = "seed-used"
    if len(tasks) < 2:
        return [skip(name, "not to be seen: there is one task only")]
    starts = set(await plays.openings(tasks))
    if len(starts) > 1:
        return [ok(name, f"{len(tasks)} seeds gave {len(starts)} different tasks")]
    tries = [*((policy, 0) for policy in IDLE.values()), *((calls, dice) for dice in range(1, 13))]
    courses = [await plays.play(policy, tasks, dice=dice) for policy, dice in tries]
    same = all(len({str(course(t)) for t in played}) == 1 for played in courses)
    if same and len({await _hidden(plays, task) for task in tasks}) == 1:
        return [fail(name, "every seed gave the same task and the same end; take the task from `seed` in reset")]
    return [
        warn(name, "every task begins with the same words; good where the seed decides what is hidden, and only there")
    ]


async def _hidden(plays: Plays, task: int, split: str = "train") -> str:
    """Return what an environment keeps to itself after a reset, as text to compare."""
    env = plays.spec.make()
    try:
        raised = await tried(lambda: env.reset(seed=task, options={"split": split}))
        own = repr(sorted(vars(env).items(), key=lambda item: item[0])) if raised is None else raised
        return re.sub(r"0x[0-9a-f]+", "", own)
    finally:
        await tried(env.close)
        await tried(env.close_tools)


async def splits_apart(plays: Plays, train: Sequence[int], test: Sequence[int]) -> list[Finding]:
    """No task of the test split begins as one of the train split does."""
    name = "splits-apart"
    trained = dict(zip(await plays.openings(train, together=True), train, strict=True))
    tested = dict(zip(await plays.openings(test, together=True, split="test"), test, strict=True))
    if len(trained) == 1 and len(train) > 1:
        return [skip(name, "not to be seen: every task begins with the same words")]
    alike = sorted((trained.keys() & tested.keys()) - {"a fault", "a broken contract"}, key=tested.__getitem__)
    common = [o for o in alike if await _hidden(plays, trained[o]) == await _hidden(plays, tested[o], "test")]
    if not common:
        said = f"; {len(alike)} begin with the same words and hide something else" if alike else ""
        return [ok(name, f"none of {len(test)} test tasks is one of {len(train)} train tasks{said}")]
    shared = common[0]
    return [
        fail(
            name,
            f"{len(common)} of {len(test)} test tasks are train tasks too (test {tested[shared]} is train "
            f"{trained[shared]}): let options['split'] choose between tasks that have nothing in common",
        )
    ]


async def dice_left_alone(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """An episode moves no generator that the whole process shares."""
    name = "global-dice"
    with global_dice(7):
        before = _states()
        await plays.play(calls, tasks)
        moved = [which for which, state in _states().items() if before.get(which) != state]
    if not moved:
        return [ok(name, "no episode drew from a generator that the whole process shares")]
    way_out = "episodes run beside each other, so draw from a random.Random(seed) of the episode's own"
    return [warn(name, f"an episode drew from, or seeded, {' and '.join(moved)}; {way_out}")]


def _states() -> dict[str, str]:
    numpy = sys.modules.get("numpy")
    states = {"the module random": repr(random.getstate())}
    return states | ({"numpy.random": repr(numpy.random.get_state())} if numpy else {})
