"""An episode played again from its record: the model's turns and the tools' answers are those of then.

From a turn on another policy may go on. A tool that is then asked what it was asked before says what it said; asked
anything else, it is called.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.engine import Engine
from agentrl.env import Env, EnvSpec, ToolEnv
from agentrl.errors import ToolError, WorldFault
from agentrl.rollout import Rollout
from agentrl.tool import Tool
from agentrl.types import REFUSAL, Completion, SamplingParams, Stop, Trajectory, refused_answers


class Recording:
    """What the tools of an episode said: by name and arguments, in order."""

    def __init__(self, before: Trajectory, live: bool) -> None:
        self.live, self.called = live, 0
        self._said: dict[tuple[str, str], deque[tuple[str, bool]]] = defaultdict(deque)  # text, and was it a refusal
        asked: dict[str, tuple[str, str]] = {}  # in the last turn; the same words twice have the same id
        refused = refused_answers(before.messages, any(c.status == "refused" for c in before.calls))
        for message, refusal in zip(before.messages, refused, strict=True):
            for call in message.get("tool_calls") or ():
                asked[call["id"]] = _key(call["function"]["name"], call["function"]["arguments"])
            if (key := asked.get(message.get("tool_call_id", ""))) is not None:
                self._said[key].append((message["content"], refusal))

    def of(self, tool: Tool) -> Tool:
        """The tool, which says what it said; asked anything else, it is called, where that is allowed."""

        async def function(**arguments: Any) -> str:
            said = self._said.get(_key(tool.name, arguments))
            if said:
                text, refusal = said.popleft() if len(said) > 1 else said[0]
                if refusal:
                    raise ToolError(text.removeprefix(REFUSAL))
                return text
            if not self.live:
                raise WorldFault("not_recorded", f"tool {tool.name!r} was not asked {arguments!r:.200} then")
            self.called += 1
            return await tool(**arguments)

        return replace(tool, function=function, retries=0, process=False, limit=None, breaker=None)


def _key(name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    return name, json.dumps(arguments, sort_keys=True, default=str)


class RecordedSpec(EnvSpec):
    """Makes environments whose tools say what they said."""

    def __init__(self, spec: EnvSpec, recording: Recording) -> None:
        self.__dict__.update(vars(spec))
        self.recording = recording

    def make(self) -> Env:
        env = super().make()
        if isinstance(env, ToolEnv):
            env.__dict__["_tools"] = {name: self.recording.of(t) for name, t in env._tools.items()}
        return env


class RecordedEngine:
    """Says what the model said, turn by turn; then another engine goes on, or it is over."""

    capacity = 1

    def __init__(self, before: Trajectory, turns: int, then: Engine | None) -> None:
        self.segments = [s for s in before.segments if s.author == "model"][:turns]
        self.turn, self.then = 0, then
        self.recorded, self.stop = before.turns, before.stop
        self.max_context = then.max_context if then is not None else 1 << 40
        self.version = 0

    async def generate(self, token_ids: Any, params: SamplingParams, *, session: str) -> Completion:
        turn, self.turn = self.turn, self.turn + 1
        if turn < len(self.segments):
            s = self.segments[turn]
            if params.stop_token_ids:
                ended = bool(s.token_ids) and s.token_ids[-1] in params.stop_token_ids
            else:  # an endpoint's: only the last turn can have been cut
                ended = turn + 1 < self.recorded or self.stop is not Stop.MAX_TOKENS
            return Completion(s.token_ids, s.logprobs or (), s.versions or (), "stop" if ended else "length")
        if self.then is None:
            raise WorldFault("record_ended", f"the environment goes on after turn {turn}, where the record ends")
        return await self.then.generate(token_ids, params, session=session)

    def end_session(self, session: str) -> None:
        if self.then is not None:
            self.then.end_session(session)

    async def update_weights(self, policy: Any, version: int) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Replay:
    """An episode as it went this time. ``differs`` says where first; empty where nothing does."""

    before: Trajectory
    after: Trajectory
    called: int  # tools that were called, since they had not been asked that then
    differs: str


async def replayed(
    rollout: Rollout, before: Trajectory, *, turns: int | None = None, live: bool = True, then: Engine | None = None
) -> Replay:
    """Play it again.

    Args:
        rollout: of the run's environment and renderer; its spec is open, its engine is not used.
        turns: the model's turns that are taken from the record; all by default.
        live: tools may be called for what is not on record.
        then: what goes on after those turns.
    """
    recording = Recording(before, live)
    taken = before.turns if turns is None else turns
    engine = RecordedEngine(before, taken, then)
    again = replace(rollout, spec=RecordedSpec(rollout.spec, recording), engine=engine, spare=0, branching=None)
    again.playing = set()
    group = await again.group(before.task, 1)
    (after,) = group.trajectories
    return Replay(before, after, recording.called, difference(before, after))


def difference(before: Trajectory, after: Trajectory) -> str:
    """Where two episodes first go different ways, in words; empty where they do not."""
    for number, (one, other) in enumerate(zip(before.segments, after.segments, strict=False)):
        if one.token_ids != other.token_ids or one.author != other.author:
            turn = sum(s.author == "model" for s in before.segments[:number])
            same = next(
                (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b),
                min(len(one.token_ids), len(other.token_ids)),
            )
            what = {"prompt": "the prompt", "model": f"turn {turn}", "world": f"what the world said to turn {turn - 1}"}
            return f"{what[one.author]} differs from its token {same} on"
    if len(before.segments) != len(after.segments) or before.stop != after.stop:
        then, now = (f"by {t.stop.value} after {t.turns} turns" for t in (before, after))
        return f"then it ended {then}, now {now}"
    if dict(before.rewards) != dict(after.rewards):
        return f"the same tokens, but other rewards: {dict(before.rewards)} then, {dict(after.rewards)} now"
    return ""
