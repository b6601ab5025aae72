"""The replay of an episode from its record: the same turns of the model, the same answers of the tools.

Another policy may take over at a turn. A tool call that is on record then gets the recorded answer; any other calls the
tool.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.environments.env import Env, ToolEnv
from agentrl.environments.spec import EnvSpec
from agentrl.errors import InfraError, ToolError
from agentrl.rollout.engine_protocol import Engine
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.token_context import TokenContext
from agentrl.tools.spawn import is_spawn
from agentrl.tools.tool import Tool
from agentrl.types import (
    ERROR_PREFIX,
    Completion,
    SamplingParams,
    Segment,
    Stop,
    ThreadRole,
    Trajectory,
    find_failed_answers,
)


class _Recording:
    """The answers of an episode's tools, in order, by name and arguments."""

    def __init__(self, before: Trajectory, live: bool) -> None:
        self.live, self.called = live, 0
        self._answers: dict[tuple[str, str], deque[tuple[str, bool]]] = defaultdict(deque)  # text, has it failed
        keys: dict[str, tuple[str, str]] = {}  # in the last turn; the same words twice have the same id
        messages = [
            *before.messages,
            *(m for t in before.threads if t.role is ThreadRole.SUB_AGENT for m in t.messages),
        ]
        failed = find_failed_answers(messages, any(c.failed for c in before.calls))
        for message, is_error in zip(messages, failed, strict=True):
            for call in message.get("tool_calls") or ():
                keys[call["id"]] = _key(call["function"]["name"], call["function"]["arguments"])
            if (key := keys.get(message.get("tool_call_id", ""))) is not None:
                self._answers[key].append((message["content"], is_error))

    def wrap(self, tool: Tool) -> Tool:
        """Return a tool that answers from the record, and calls ``tool`` for what is not in it, if that is allowed."""
        if is_spawn(tool):  # its answer is what a sub-agent says, whose turns are on record
            return tool

        async def function(**arguments: Any) -> str:
            answers = self._answers.get(_key(tool.name, arguments))
            if answers:
                text, is_error = answers.popleft() if len(answers) > 1 else answers[0]
                if is_error:
                    raise ToolError(text.removeprefix(ERROR_PREFIX))
                return text
            if not self.live:
                raise InfraError("not_recorded", f"tool {tool.name!r} was not asked {arguments!r:.200} then")
            self.called += 1
            return await tool(**arguments)

        unlimited = replace(tool, max_concurrency=None, max_consecutive_failures=None)
        return replace(unlimited, function=function, retries=0, process=False)


def _key(name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    return name, json.dumps(arguments, sort_keys=True, default=str)


class _RecordedSpec(EnvSpec):
    """A spec whose environments have tools that answer from a record."""

    def __init__(self, spec: EnvSpec, recording: _Recording) -> None:
        self.__dict__.update(vars(spec))
        self.recording = recording

    def make(self) -> Env:
        env = super().make()
        if isinstance(env, ToolEnv):
            env.__dict__["_tools"] = {name: self.recording.wrap(t) for name, t in env._tools.items()}
        return env


class RecordedEngine:
    """An engine that generates the recorded turns; then another engine takes over, or the episode fails."""

    capacity = 1

    def __init__(self, before: Trajectory, turns: int, then: Engine | None) -> None:
        played = list(_list_turns(before))
        self.played = [played[place] for place in before.in_time][:turns]
        self.turn, self.then = 0, then
        self._threads = len(before.threads)
        self.recorded, self.stop = before.turns, before.stop
        self.max_context = then.max_context if then is not None else 1 << 40
        self.version = 0

    async def generate(self, token_ids: Any, params: SamplingParams, *, session: str) -> Completion:
        turn, self.turn = self.turn, self.turn + 1
        if self._threads and turn < len(self.played):  # several may be asked for at the same time, in another order
            asked = next((i for i, (c, _) in enumerate(self.played[turn:], turn) if c == token_ids), turn)
            self.played.insert(turn, self.played.pop(asked))
        if turn < len(self.played):
            _, s = self.played[turn]
            if params.stop_token_ids:
                ended = bool(s.token_ids) and s.token_ids[-1] in params.stop_token_ids
            else:  # an endpoint's: only the last turn can have been cut
                ended = turn + 1 < self.recorded or self.stop is not Stop.MAX_TOKENS
            return Completion(s.token_ids, s.logprobs or (), s.versions or (), "stop" if ended else "length")
        if self.then is None:
            raise InfraError("record_ended", f"the environment goes on after turn {turn}, where the record ends")
        return await self.then.generate(token_ids, params, session=session)

    def end_session(self, session: str) -> None:
        if self.then is not None:
            self.then.end_session(session)

    async def update_weights(self, policy: Any, version: int) -> None: ...

    async def close(self) -> None: ...


def _list_turns(before: Trajectory) -> Iterator[tuple[TokenContext, Segment]]:
    """Yield each turn and the tokens before it, as it stands in the row."""
    for context in before.contexts:
        token_ids = TokenContext()
        for segment in context:
            if segment.author == "model":
                yield token_ids.copy(), segment
            token_ids.extend(segment.token_ids)


@dataclass(frozen=True)
class Replay:
    """An episode and its replay. ``differs`` describes the first difference; empty if there is none."""

    before: Trajectory
    after: Trajectory
    called: int  # tool calls that were not on record
    differs: str


async def replay_episode(
    rollout: Rollout, before: Trajectory, *, turns: int | None = None, live: bool = True, then: Engine | None = None
) -> Replay:
    """Replay an episode.

    Args:
        rollout: of the run's environment and renderer; its spec is open, its engine is not used.
        turns: the model's turns that are taken from the record; all by default.
        live: call tools for what is not on record.
        then: the engine that takes over after those turns.
    """
    recording = _Recording(before, live)
    recorded = before.turns if turns is None else turns
    engine = RecordedEngine(before, recorded, then)
    again = replace(rollout, spec=_RecordedSpec(rollout.spec, recording), engine=engine, oversample=0, branching=None)
    again.running = set()
    group = await again.group(before.task, 1)
    (after,) = group.trajectories
    return Replay(before, after, recording.called, _find_difference(before, after))


def _find_difference(before: Trajectory, after: Trajectory) -> str:
    """Describe the first difference of two episodes; empty if there is none."""
    for number, (one, other) in enumerate(zip(before.segments, after.segments, strict=False)):
        if one.token_ids != other.token_ids or one.author != other.author:
            turn = sum(s.author == "model" for s in before.segments[:number])
            same = next(
                (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b),
                min(len(one.token_ids), len(other.token_ids)),
            )
            what = {
                "prompt": "the prompt",
                "model": f"turn {turn}",
                "env": f"what the environment said to turn {turn - 1}",
            }
            return f"{what[one.author]} differs from its token {same} on"
    if len(before.segments) != len(after.segments) or before.stop != after.stop:
        then, now = (f"by {t.stop.value} after {t.turns} turns" for t in (before, after))
        return f"then it ended {then}, now {now}"
    if dict(before.rewards) != dict(after.rewards):
        return f"the same tokens, but other rewards: {dict(before.rewards)} then, {dict(after.rewards)} now"
    return ""
