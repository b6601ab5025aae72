"""Checks that episodes keep to themselves: they share no state, and close what they open."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence

from agentrl.checks.finding import Finding, fail, ok, skip, warn
from agentrl.checks.harness import EpisodeHarness, find_difference
from agentrl.checks.open_resources import count_open, describe_counts, find_growth
from agentrl.checks.shared_state import find_changes, take_snapshot
from agentrl.checks.untrained_policies import call_at_random
from agentrl.environments.spec import EnvSpec
from agentrl.tools.tool import Tool


async def check_episodes_apart(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Check that the same calls in the same task give the same episode, alone and beside others."""
    name = "episodes-apart"
    alone = await harness.play(call_at_random, tasks)
    again = await harness.play(call_at_random, tasks)
    beside = await harness.play(call_at_random, tasks, together=True)
    backwards = (await harness.play(call_at_random, tasks[::-1]))[::-1]
    for task, one, other in zip(tasks, alone, again, strict=True):
        if (apart := find_difference(one, other)) is not None:
            way_out = "what an episode keeps belongs on self (of an environment, or of a Toolset), and nowhere else"
            return [fail(name, f"task {task}, played twice with the same calls, differs in {apart}; {way_out}")]
    for task, one, *others in zip(tasks, alone, beside, backwards, strict=True):
        for where, other in zip(("beside others", "after others"), others, strict=True):
            if (apart := find_difference(one, other)) is not None:
                return [
                    fail(name, f"task {task}, alone and {where}, differs in {apart}; keep an episode's own on self")
                ]
    if all(t is None or t.fault is not None for t in alone):
        return [skip(name, "nothing was shown: each of the episodes ended in a fault")]
    return [ok(name, f"{len(tasks)} episodes came to the same alone, again, beside and after others")]


def make_state_snapshot(spec: EnvSpec, tools: Sequence[Tool]) -> Callable[[], dict[str, object]]:
    """Return a function that snapshots all state shared between episodes."""
    plain = spec.shared if type(spec.shared) in (dict, list, set) else None  # a pool may change
    more = {"a value of the settings": spec.settings, "self.shared": plain}
    return lambda: take_snapshot([spec.cls], tools, more)


def check_state_kept(before: dict[str, object], after: dict[str, object]) -> list[Finding]:
    """Return a finding for each value that changed and that every episode sees."""
    name, findings = "state-kept", []
    for which in find_changes(before, after):
        if which in ("self.shared",) or (which[:1].islower() and not which.startswith(("the defaults", "a value"))):
            sentence = "if that is a cache, good; if it is an episode's, it belongs on self"
            findings.append(warn(name, f"{which} was changed by episodes, and outlives them: {sentence}"))
        else:
            way_out = "make it in reset or __init__, on self"
            findings.append(fail(name, f"{which} was changed by an episode, and every later one sees it: {way_out}"))
    return findings[:6] or [ok(name, "no class, module, setting or default argument was changed by an episode")]


async def check_left_open(harness: EpisodeHarness, tasks: Sequence[int]) -> list[Finding]:
    """Check that nothing is open after a round that was not open before it."""
    await harness.play(call_at_random, tasks, together=True)
    before = count_open()
    await harness.play(call_at_random, tasks, together=True)
    if more := await find_growth(before, least=max(len(tasks) // 2, 1)):
        sentence = (
            f"{len(tasks)} episodes left {describe_counts(more)} open: close them in close(), which is always called"
        )
        return [fail("left-open", sentence)]
    return [ok("left-open", "episodes left no thread, file, process or task open")]


async def check_closes(spec: EnvSpec, task: int) -> list[Finding]:
    """Check that ``close`` works without a reset before it, and twice."""
    name = "closes"
    bare, env = spec.make(), spec.make()
    if (error := await catch_error(bare.close)) is not None:
        sentence = f"close() of an environment that was never reset raised {error}"
        return [fail(name, f"{sentence}: a reset may fail, and it is closed then; set what close needs in __init__")]
    await catch_error(lambda: env.reset(seed=task, options={"split": "train"}))
    for time in ("", " the second time"):
        for close in (env.close, env.close_tools):
            if (error := await catch_error(close)) is not None:
                return [fail(name, f"{close.__qualname__}() raised {error}{time}; closing twice must do no harm")]
    return [ok(name, "close works twice, and without a reset before it")]


async def catch_error(call: Callable[[], Awaitable[object]]) -> str | None:
    """Run somebody else's code; return its exception in words, or None."""
    try:
        result = call()
        if inspect.isawaitable(result):
            await result
    except Exception as error:  # somebody else's code, told in a sentence
        return f"{type(error).__name__}: {error}"
    return None
