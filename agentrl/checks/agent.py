"""The checks of somebody else's agent: it plays two scripted episodes, and its requests say what it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import anyio

from agentrl.agents.agent import Agent
from agentrl.checks.argument_fuzzing import draw_arguments
from agentrl.checks.budget import CheckRun, FindingCallback
from agentrl.checks.consent import select_allowed
from agentrl.checks.finding import Finding, fail, ok, skip, warn
from agentrl.environments.spec import EnvSpec
from agentrl.gateway.agent_episode import AgentEpisode
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Completion, JsonSchema, Message, SamplingParams, Stop, Trajectory

ANSWER = "The answer is \\boxed{1}."
BROKEN = "<tool_call>{broken</tool_call>"  # a call that nobody can read
DEADLINE_S = 30.0  # of an episode
OFFERED = 300  # begins the tokens of a request that offers the tool


def check_agent(
    agent: Agent,
    spec: EnvSpec,
    *,
    budget_s: float | None = None,
    allow_writes: Collection[str] = (),
    on_finding: FindingCallback | None = None,
    on_check: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Let an agent play a scripted policy, and return what was found.

    Args:
        agent: as `agentrl.agents.forms.parse_agent` gives it.
        spec: of the environment that gives the task and the tools.
        budget_s, allow_writes, on_finding, on_check: as for `agentrl.checks.env.check_env`.

    Raises:
        UserError: the agent cannot be started, the environment broke its contract, or there is no tool of such a name.
    """
    run = CheckRun(budget_s, on_finding, on_check)
    anyio.run(_inspect, agent, spec, allow_writes, run)
    return run.findings


async def _inspect(agent: Agent, spec: EnvSpec, allow_writes: Collection[str], run: CheckRun) -> None:
    tools = spec.tool_list()
    allowed, skipped = select_allowed(tools, allow_writes)
    tool = next(iter(allowed), None)
    if tool is None:
        run.add(*(skipped or [skip("tools", "the environment has none")]))
    asks = call(tool.name, **draw_arguments(tool.parameters, random.Random(0))) if tool else ANSWER
    bench = _AgentTrial(agent, spec, tool.name if tool else None)
    async with spec.open(), bench.gateway.open():
        await run.run("an episode", lambda: bench.check_episode([asks, ANSWER]))
        if bench.episode is not None and bench.episode.forest.turns:
            await run.run("a broken call", lambda: bench.check_broken([BROKEN, ANSWER]))


class _AgentTrial:
    """Plays episodes of a script, and keeps the last one.

    Args:
        tool: that the policy calls, if any: what is asked without it, such as a title, is then no part of the script.
    """

    def __init__(self, agent: Agent, spec: EnvSpec, tool: str | None) -> None:
        self.spec, self.tool, self.told = spec, tool, list[str]()
        self.waits_for = tool  # None: no request offers it, and the script is for those of the first thread
        self.gateway = Gateway(agent, say=self.told.append)
        self.episode: AgentEpisode | None = None

    async def play(self, script: list[str]) -> Trajectory:
        engine = _ScriptedPolicy(script, waits=self.waits_for is not None)
        renderer = _OfferRenderer(self.waits_for)
        rollout = Rollout(self.spec, engine, renderer, EpisodeLimits(episode_timeout_s=DEADLINE_S))
        rollout.begin = self._begin
        played = await rollout.episode(0)
        if engine.waits and engine.turns and not engine.turns[""]:
            self.waits_for = None
            return await self.play(script)
        return played

    def _begin(self, *given: Any) -> AgentEpisode:
        self.episode = self.gateway.begin(*given)
        return self.episode

    async def check_episode(self, script: list[str]) -> list[Finding]:
        """Find out how it asks, whether it goes on from its turns, calls the tools, and ends."""
        played = await self.play(script)
        if played.fault is not None:
            return [fail("plays", _cut_trace(played.fault.message))]
        assert self.episode is not None
        spoken = ", ".join(f"{name} ({n} request{'s' * (n > 1)})" for name, n in self.episode.requests.items())
        found = [ok("speaks", spoken), _judge_history(played), *_judge_side_calls(played)]
        if self.tool is not None:
            found.append(_judge_tools(played, self.tool))
        found += [warn("sampling", line) for line in self.told]
        if not self.told:
            found.append(ok("sampling", "it leaves the sampling to the run"))
        return [*found, _judge_end(played)]

    async def check_broken(self, script: list[str]) -> list[Finding]:
        """Find out what it makes of a call that nobody can read."""
        played = await self.play(script)
        what = "a broken call"
        if played.fault is not None or played.stop is Stop.AGENT_ERROR:
            why = _cut_trace(played.fault.message if played.fault else str(played.info["agent_error"]))
            return [warn(what, f"it ends by it, and every such episode is scored as it stands: {why}")]
        if played.turns > 1:
            return [ok(what, "it tells the model, which may try again")]
        return [warn(what, "it takes the turn for the last one: the model is not told what was wrong")]


class _OfferRenderer(ByteRenderer):
    """A renderer that tells whether a request offers a tool."""

    def __init__(self, tool: str | None) -> None:
        super().__init__()
        self.tool = tool

    def render_ids(self, messages: Sequence[Message], *, tools: Sequence[JsonSchema] = ()) -> list[int]:
        offered = any(t["function"]["name"] == self.tool for t in tools)
        return [*([OFFERED] if offered else []), *super().render_ids(messages, tools=tools)]


class _ScriptedPolicy(ScriptedEngine):
    """Says a script where the tool is offered (``waits``), or else in the first thread, and an answer elsewhere."""

    def __init__(self, script: Sequence[str], *, waits: bool) -> None:
        super().__init__(lambda session, turn: ANSWER if session else script[min(turn, len(script) - 1)])
        self.waits = waits

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        apart = OFFERED not in token_ids if self.waits else "." in session
        return await super().generate(token_ids, params, session="apart" if apart else "")


def _cut_trace(message: str) -> str:
    """Return an error's line, and the place in the agent's own code that it came from."""
    first, *trace = message.splitlines()
    places = [line.strip() for line in trace if line.lstrip().startswith("File ")]
    return f"{first} ({places[-1]})" if places else first


def _judge_history(played: Trajectory) -> Finding:
    threads = int(played.metrics["agent/threads"] - played.metrics["agent/side_calls"])
    if played.turns < 2:
        return skip("history", "it had one turn: whether it sends history as it was is not known")
    if threads == 1:
        return ok("history", f"its {played.turns} turns are one thread: each goes on from the one before, verbatim")
    return warn(
        "history",
        f"its {played.turns} turns are {threads} threads: it writes its history anew, or has sub-agents. All is "
        "trained, once; what threads share is computed once, and what was rewritten again",
    )


def _judge_side_calls(played: Trajectory) -> list[Finding]:
    count = int(played.metrics["agent/side_calls"])
    return [ok("side calls", f"{count} of its requests are apart from the task, and are not trained")] if count else []


def _judge_tools(played: Trajectory, tool: str) -> Finding:
    if any(c.name == tool for c in played.calls):
        return ok("tools", f"a call of {tool} is run by the environment")
    return warn(
        "tools", f"the model called {tool}, and the environment was not asked: does the agent offer tools of its own?"
    )


def _judge_end(played: Trajectory) -> Finding:
    if played.stop is Stop.AGENT_ERROR:
        return fail("ends", f"by an error: {_cut_trace(str(played.info['agent_error']))}")
    if played.stop is Stop.TERMINATED:
        return ok("ends", f"by itself, after {played.turns} turns; its answer is what was said last")
    return warn("ends", f"by {played.stop.value}, after {played.turns} turns")
