"""Checks of tasks: a seed gives the same task always, other seeds give others, and no test task is trained."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence

from agentrl.checks import other_process
from agentrl.checks.finding import Finding, fail, ok, skip, warn
from agentrl.checks.harness import EpisodeHarness, describe_course, seed_global_rng
from agentrl.checks.isolation import catch_error
from agentrl.checks.untrained_policies import UNTRAINED_POLICIES, call_at_random

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


async def check_begins(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Return a finding if no task begins at all: what ``reset`` raised."""
    await harness.openings(tasks)
    raised = [t.fault for t in harness.played if t.fault is not None and t.fault.kind == "env_reset"]
    if len(raised) < len(tasks) or not raised:
        return []
    lines = raised[0].message.strip().splitlines()
    return [fail("begins", f"{lines[0].removesuffix(': Traceback (most recent call last):')} raised {lines[-1]:.300}")]


async def check_repeats(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Reset the same tasks in other orders, with other global seeds, beside and after others; compare the openings."""
    first = await harness.openings(tasks)
    for when, rng_seed, together in ((AGAIN, 0, False), (DICE, 1, False), (BESIDE, 0, True), (AFTER, 0, False)):
        if when is AFTER:
            await harness.play(call_at_random, tasks)
        order = -1 if when is AFTER else 1
        openings = await harness.openings(tasks[::order], rng_seed=rng_seed, together=together)
        for task, one, other in zip(tasks, first, openings[::order], strict=True):
            if one != other:
                return [fail(SEED, f"reset(seed={task}) began with {_apart(one, other)} {when[0]}; {when[1]}")]
    return [ok(SEED, f"{len(tasks)} seeds gave the same task each time: again, in any order, beside and after others")]


async def check_repeats_elsewhere(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Reset the same tasks in other processes, with other hash seeds; compare the openings."""
    name = "same-seed-elsewhere"
    if (request := other_process.format_request(harness.spec, tasks)) is None:
        why = "another process cannot make it: its class is inside a function or script, or a setting is an object"
        return [skip(name, f"not tried: {why}")]
    here = await harness.openings(tasks)
    openings = await other_process.run_openings(request)
    if isinstance(openings, str):
        return [fail(name, f"it cannot be opened and reset in another process: {openings}")]
    for other in openings:
        for task, one, there in zip(tasks, here, other, strict=True):
            if one != there:
                way_out = "nothing may hang on the order of a set, on hash() of text, or on id(); sort first"
                return [fail(name, f"reset(seed={task}) began with {_apart(one, there)} in another process; {way_out}")]
    return [ok(name, f"the same tasks in {len(openings)} other processes, each with another PYTHONHASHSEED")]


def _apart(one: str, other: str) -> str:
    """Quote two texts, from a little before they differ."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(at - 20, 0)
    return f"{one[start : start + 60]!r}, and with {other[start : start + 60]!r}"


async def check_seeds_used(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Check that other seeds give other tasks."""
    name = "seed-used"
    if len(tasks) < 2:
        return [skip(name, "not to be seen: there is one task only")]
    starts = set(await harness.openings(tasks))
    if len(starts) > 1:
        return [ok(name, f"{len(tasks)} seeds gave {len(starts)} different tasks")]
    tries = [
        *((policy, 0) for policy in UNTRAINED_POLICIES.values()),
        *((call_at_random, seed) for seed in range(1, 13)),
    ]
    courses = [await harness.play(policy, tasks, seed=seed) for policy, seed in tries]
    same = all(len({str(describe_course(t)) for t in played}) == 1 for played in courses)
    if same and len({await _hidden(harness, task) for task in tasks}) == 1:
        return [fail(name, "every seed gave the same task and the same end; take the task from `seed` in reset")]
    return [
        warn(name, "every task begins with the same words; good where the seed decides what is hidden, and only there")
    ]


async def _hidden(harness: EpisodeHarness, task: int, split: str = "train") -> str:
    """Return the environment's attributes after a reset, as text to compare."""
    env = harness.spec.make()
    try:
        raised = await catch_error(lambda: env.reset(seed=task, options={"split": split}))
        kept = {n: v for n, v in sorted(vars(env).items()) if n != "_episode_number"}  # which is no task's
        own = repr(kept) if raised is None else raised
        return re.sub(r"0x[0-9a-f]+", "", own)
    finally:
        await catch_error(env.close)
        await catch_error(env.close_tools)


async def check_splits_apart(harness: EpisodeHarness, train: Sequence[int], test: Sequence[int]) -> list[Finding]:
    """Check that no task of the test split is one of the train split."""
    name = "splits-apart"
    if not test:
        return [skip(name, "not to be seen: the test split has no tasks, and nothing can be evaluated")]
    trained = dict(zip(await harness.openings(train, together=True), train, strict=True))
    tested = dict(zip(await harness.openings(test, together=True, split="test"), test, strict=True))
    if len(trained) == 1 and len(train) > 1:
        return [skip(name, "not to be seen: every task begins with the same words")]
    alike = sorted((trained.keys() & tested.keys()) - {"a fault", "a broken contract"}, key=tested.__getitem__)
    common = [o for o in alike if await _hidden(harness, trained[o]) == await _hidden(harness, tested[o], "test")]
    if not common:
        alike_note = f"; {len(alike)} begin with the same words and hide something else" if alike else ""
        return [ok(name, f"none of {len(test)} test tasks is one of {len(train)} train tasks{alike_note}")]
    shared = common[0]
    return [
        fail(
            name,
            f"{len(common)} of {len(test)} test tasks are train tasks too (test {tested[shared]} is train "
            f"{trained[shared]}): let options['split'] choose between tasks that have nothing in common",
        )
    ]


async def check_global_rng(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Check that episodes draw from no random generator that the whole process shares."""
    name = "global-rng"
    with seed_global_rng(7):
        before = _rng_states()
        await harness.play(call_at_random, tasks)
        moved = [which for which, state in _rng_states().items() if before.get(which) != state]
    if not moved:
        return [ok(name, "no episode drew from a generator that the whole process shares")]
    way_out = "episodes run beside each other, so draw from a random.Random(seed) of the episode's own"
    return [warn(name, f"an episode drew from, or seeded, {' and '.join(moved)}; {way_out}")]


def _rng_states() -> dict[str, str]:
    numpy = sys.modules.get("numpy")
    states = {"the module random": repr(random.getstate())}
    return states | ({"numpy.random": repr(numpy.random.get_state())} if numpy else {})
