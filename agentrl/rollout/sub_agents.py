"""The sub-agents of an episode: conversations that the model opens by the tool ``spawn``, played by the same policy.

Each is a thread of the episode: its tokens are trained once, with the episode's reward. It has the environment's tools
but ``spawn``, the system's words and the task that it was given; what it says without a call is the tool's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentrl.environments.env import ToolEnv
from agentrl.environments.validation import as_messages, validate_step
from agentrl.errors import ConfigError, UserError
from agentrl.rollout.seeds import mix_seeds
from agentrl.rollout.threads.forest import SampledTurn, ThreadForest, TurnRefused
from agentrl.rollout.threads.open_thread import OpenThread
from agentrl.runtime.threads import open_task_group
from agentrl.tools.spawn import is_spawn
from agentrl.types import ERROR_PREFIX, CallRecord, Message, Reply, Segment, Step, Thread, ThreadRole, ToolCall

if TYPE_CHECKING:
    from agentrl.rollout.episode import Episode

_SEED = 0x5B  # apart from the turns of the episode itself


def list_spawns(env: object, reply: Reply) -> list[ToolCall]:
    """List the calls of a turn that open a sub-agent; what cannot be read is the environment's to refuse."""
    named = [call for call in reply.tool_calls if call.name == "spawn" and call.error is None]
    if not named or not isinstance(env, ToolEnv) or not any(map(is_spawn, env.tool_list)):
        return []
    return [c for c in named if c.arguments.keys() == {"task"} and isinstance(c.arguments["task"], str)]


def check_own_context(*, folds: bool = False, branches: bool = False, rewrites: bool = False) -> None:
    """Refuse sub-agents of episodes whose own conversation is not one context, by a ConfigError."""
    told = {"rollout.context fold": folds, "rollout.branches": branches, "template.history as_template": rewrites}
    if others := [name for name, given in told.items() if given]:
        raise ConfigError(f"the tool spawn and {others[0]} do not go together: leave one of them out")


@dataclass(eq=False)
class SubAgents:
    """The sub-agents of one episode.

    Args:
        main: the numbers of the episode's own turns, in the order of time over all threads.
    """

    episode: Episode
    forest: ThreadForest
    main: list[int]
    begun: dict[int, int] = field(default_factory=dict)  # the first turn of a sub-agent: the main one it stands behind
    step_rewards: dict[int, float] = field(default_factory=dict)  # of the environment's steps, by the turn
    ended: Step | None = None  # a step of a sub-agent that ended the episode
    _stepping: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sampling: int = 0  # sub-agents that wait for the engine
    _since: float = 0.0  # when the first of them began to

    @classmethod
    def begin(cls, episode: Episode) -> SubAgents:
        """Make room for sub-agents behind the turn that the model has just taken.

        Raises:
            ConfigError: the episode's own contexts are folded, rewritten or branched.
        """
        branches = getattr(episode.context, "branching", None) is not None
        check_own_context(folds=episode.folded is not None, branches=branches)
        seed = mix_seeds(episode.seed, _SEED)
        session = f"{episode.session}.sub"
        forest = ThreadForest(episode.context, episode.renderer, seed, session, goes_on_when_cut=True)
        forest.other_tokens = lambda: episode.behind
        forest.turns, forest.turn_ended = episode.turn + 1, episode.clock()
        own = cls(episode, forest, list(range(episode.turn + 1)))
        forest.answering = own._time_engine
        return own

    @contextmanager
    def _time_engine(self) -> Iterator[None]:
        """Count seconds in which sub-agents wait for the engine as the engine's, and not as the environment's."""
        clock, timings = self.episode.clock, self.episode.timings
        if not self._sampling:
            self._since = clock()
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1
            if not self._sampling:
                seconds = clock() - self._since
                timings["generate"] += seconds
                timings["tools"] -= seconds  # the stage counts all of it when it ends

    def count_turn(self) -> None:
        """Give a turn of the episode's own its number."""
        self.main.append(self.forest.turns)
        self.forest.turns += 1

    async def act(self, env: ToolEnv, reply: Reply, spawns: Sequence[ToolCall]) -> Step:
        """Play the sub-agents that a turn opens, and let the environment answer its other calls; return one step."""
        answers: dict[str, Message] = {}
        others = tuple(call for call in reply.tool_calls if call not in spawns)
        step = Step([], 0.0, False, False, {})
        async with open_task_group() as tasks:
            for number, call in enumerate(spawns):
                tasks.start_soon(self._answer, env, call, number, answers)
        if others and self.ended is None:
            env._turn = self.main[-1]
            step = validate_step(await self.episode._bounded(env.step(replace(reply, tool_calls=others))), env)
        told = as_messages(step.observation)
        answers |= {m["tool_call_id"]: m for m in told if "tool_call_id" in m}
        ordered = [answers[call.id] for call in reply.tool_calls if call.id in answers]
        ended = self.ended or step
        return step._replace(
            observation=[*ordered, *(m for m in told if "tool_call_id" not in m)],
            terminated=step.terminated or ended.terminated,
            truncated=step.truncated or ended.truncated,
        )

    async def _answer(self, env: ToolEnv, call: ToolCall, number: int, answers: dict[str, Message]) -> None:
        """Play one sub-agent, and write its answer."""
        started, turn, track = self.episode.clock(), self.main[-1], self.episode.track
        env.running_calls[call.id] = call.name
        track.call(call.name)
        status, text = "cancelled", ""
        try:
            answer, failed = await self._play(env, str(call.arguments["task"]), turn, f"{turn}.{number}".encode())
            status, text = ("tool", f"{ERROR_PREFIX}{answer}") if failed else ("ok", answer)
        finally:
            track.returned(call.name)
            env.running_calls.pop(call.id, None)
            env.call_records.append(CallRecord(turn, call.name, status, self.episode.clock() - started, call.span))
        message: Message = {"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name}
        if status != "ok":
            message["is_error"] = True
        answers[call.id] = message

    async def _play(self, env: ToolEnv, task: str, after: int, speaker: bytes) -> tuple[str, bool]:
        """Play a sub-agent; return what it said last, and True where that is no answer but why there is none."""
        limits, system = self.episode.context.limits, self.episode.messages[:1]
        messages: list[dict[str, Any]] = [dict(m) for m in system if m["role"] == "system"]
        messages.append({"role": "user", "content": task})
        tools = [t.schema for t in env.tool_list if not is_spawn(t)]
        said = "it said nothing"
        for _ in range(limits.max_turns or env.max_turns):
            try:
                turn = await self._sample(list(messages), tools, speaker)
            except TurnRefused as refusal:
                return f"the sub-agent ended: {refusal}; {said}", True
            self.begun.setdefault(turn.number, after)
            said = f"it said last: {turn.message.get('content') or 'nothing'}"
            if turn.finish_reason == "length":
                return f"the sub-agent ran out of tokens; {said}", True
            messages.append(turn.message)
            if not turn.message.get("tool_calls"):
                return str(turn.message.get("content") or ""), False
            for call in turn.message["tool_calls"]:
                content = await self._call(env, call["id"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if self.ended is not None:
                return f"the episode has ended; {said}", True
        return f"the sub-agent ran out of turns; {said}", True

    async def _sample(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], speaker: bytes) -> SampledTurn:
        try:
            return await self.forest.complete(messages, tools, is_retry=False, speaker=speaker)
        except (TurnRefused, UserError):
            raise
        except Exception:  # of the engine or the renderer, which are ours, and not of the environment
            self.episode.stage = "generate"
            raise

    async def _call(self, env: ToolEnv, wire: str) -> str:
        """Let the environment answer a call of a sub-agent, by its id on the wire."""
        if type(env).step is ToolEnv.step:
            return await self._step(env, wire)
        async with self._stepping:
            return await self._step(env, wire)

    async def _step(self, env: ToolEnv, wire: str) -> str:
        call, turn, _ = self.forest.calls[wire]
        env._turn = turn
        step = validate_step(await self.episode._bounded(env.step(Reply("", (call,)))), env)
        self.step_rewards[turn] = self.step_rewards.get(turn, 0.0) + float(step.reward)
        self.episode.info |= step.info
        if step.terminated or step.truncated:
            self.ended = step
        told = as_messages(step.observation)
        if len(told) == 1 and told[0]["role"] == "tool":
            self.forest.answers[wire] = told[0]
        return "\n".join(m["content"] for m in told)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def list_segments(self) -> list[Segment]:
        """List the segments of all sub-agents, a context each."""
        return [s for thread in self._played for s in thread.segments]

    def list_rewards(self) -> list[float]:
        """List the rewards of their turns, in the order of their segments."""
        return [self.step_rewards.get(number, 0.0) for thread in self._played for number in thread.turns]

    def place_calls(self, calls: Sequence[CallRecord]) -> list[int]:
        """Return each call's turn in the row: the episode's own come first."""
        order = [*self.main, *(number for thread in self._played for number in thread.turns)]
        place = {number: index for index, number in enumerate(order)}
        return [place.get(call.turn, len(order) - 1) for call in calls]

    def describe(self) -> tuple[Thread, ...]:
        """Describe the episode's threads; none where no sub-agent took a turn."""
        if not self._played:
            return ()
        main = Thread(turns=tuple(self.main), messages=tuple(self.episode.messages))
        return (main, *(self._describe_one(thread) for thread in self._played))

    def _describe_one(self, thread: OpenThread) -> Thread:
        after = self.begun.get(thread.turns[0])
        return Thread(ThreadRole.SUB_AGENT, 0, after, tuple(thread.turns), 0, tuple(thread.messages))

    @property
    def _played(self) -> list[OpenThread]:
        return [thread for thread in self.forest.threads if thread.turns]

    def close(self) -> None:
        """End the engine's sessions."""
        for branch in {thread.branch for thread in self.forest.threads}:
            self.episode.context.engine.end_session(self.forest.name_session(branch))
