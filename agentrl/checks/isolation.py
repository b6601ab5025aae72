"""Do episodes keep to themselves? What one leaves behind for others, and what it does not give back."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence

from agentrl.env import EnvSpec
from agentrl.inspection.finding import Finding, fail, ok, skip, warn
from agentrl.inspection.held import grown, held, told
from agentrl.inspection.plays import Plays, difference
from agentrl.inspection.policies import calls
from agentrl.inspection.state import changed, snapshot
from agentrl.tool import Tool


async def courses(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """The same calls in the same task come to the same, alone and beside others."""
    name = "episodes-apart"
    alone = await plays.play(calls, tasks)
    again = await plays.play(calls, tasks)
    beside = await plays.play(calls, tasks, together=True)
    backwards = (await plays.play(calls, tasks[::-1]))[::-1]
    for task, one, other in zip(tasks, alone, again, strict=True):
        if (apart := difference(one, other)) is not None:
            way_out = "what an episode keeps belongs on self (of an environment, or of a Toolset), and nowhere else"
            return [fail(name, f"task {task}, played twice with the same calls, differs in {apart}; {way_out}")]
    for task, one, *others in zip(tasks, alone, beside, backwards, strict=True):
        for where, other in zip(("beside others", "after others"), others, strict=True):
            if (apart := difference(one, other)) is not None:
                return [
                    fail(name, f"task {task}, alone and {where}, differs in {apart}; keep an episode's own on self")
                ]
    if all(t is None or t.fault is not None for t in alone):
        return [skip(name, "nothing was shown: each of the episodes ended in a fault")]
    return [ok(name, f"{len(tasks)} episodes came to the same alone, again, beside and after others")]


def roots(spec: EnvSpec, tools: Sequence[Tool]) -> Callable[[], dict[str, object]]:
    """What takes the snapshots of all that outlives an episode."""
    plain = spec.shared if type(spec.shared) in (dict, list, set) else None  # a pool may change
    more = {"a value of the settings": spec.settings, "self.shared": plain}
    return lambda: snapshot([spec.cls], tools, more)


def kept(before: dict[str, object], after: dict[str, object]) -> list[Finding]:
    """What has changed that every episode sees."""
    name, found = "state-kept", []
    for which in changed(before, after):
        if which in ("self.shared",) or (which[:1].islower() and not which.startswith(("the defaults", "a value"))):
            said = "if that is a cache, good; if it is an episode's, it belongs on self"
            found.append(warn(name, f"{which} was changed by episodes, and outlives them: {said}"))
        else:
            way_out = "make it in reset or __init__, on self"
            found.append(fail(name, f"{which} was changed by an episode, and every later one sees it: {way_out}"))
    return found[:6] or [ok(name, "no class, module, setting or default argument was changed by an episode")]


async def given_back(plays: Plays, tasks: Sequence[int]) -> list[Finding]:
    """What is open after a round that was not before it."""
    await plays.play(calls, tasks, together=True)
    before = held()
    await plays.play(calls, tasks, together=True)
    if more := await grown(before, least=max(len(tasks) // 2, 1)):
        said = f"{len(tasks)} episodes left {told(more)} open: close them in close(), which is always called"
        return [fail("left-open", said)]
    return [ok("left-open", "episodes left no thread, file, process or task open")]


async def closes(spec: EnvSpec, task: int) -> list[Finding]:
    """``close`` works without a reset before it, and twice."""
    name = "closes"
    bare, env = spec.make(), spec.make()
    if (error := await tried(bare.close)) is not None:
        said = f"close() of an environment that was never reset raised {error}"
        return [fail(name, f"{said}: a reset may fail, and it is closed then; set what close needs in __init__")]
    await tried(lambda: env.reset(seed=task, options={"split": "train"}))
    for time in ("", " the second time"):
        for close in (env.close, env.close_tools):
            if (error := await tried(close)) is not None:
                return [fail(name, f"{close.__qualname__}() raised {error}{time}; closing twice must do no harm")]
    return [ok(name, "close works twice, and without a reset before it")]


async def tried(call: Callable[[], Awaitable[object]]) -> str | None:
    """What it raised, in words."""
    try:
        found = call()
        if inspect.isawaitable(found):
            await found
    except Exception as error:  # somebody else's code, told in a sentence
        return f"{type(error).__name__}: {error}"
    return None
