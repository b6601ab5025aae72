"""Play an environment's expert: an engine whose turns `Env.expert` takes, and the episodes that it makes.

It continues conversations of `ChatRenderer`, so the rollout plays as it does with a model: the same tools under the
same time-outs, the same messages, the same rewards.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import anyio

from agentrl.environments.env import Env
from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import describe_task
from agentrl.errors import ContractError, InfraError, UserError, describe_raised, suggest
from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.renderer.json_lines import ChatRenderer, decode_conversation, encode_lines
from agentrl.rollout.episode import Episode
from agentrl.rollout.folding import CountTokens
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.threads import open_task_group
from agentrl.settings.schema import RolloutConfig
from agentrl.types import (
    Completion,
    ExpertTurn,
    JsonSchema,
    Message,
    Reply,
    SamplingParams,
    Stop,
    ToolCall,
    Trajectory,
    to_utf8,
    to_utf8_json,
)

T = TypeVar("T")
CAPACITY = 32  # episodes at once; the tools have limits of their own
_HOW = "it yields a text, a ToolCall, several of them, or a Reply"


@dataclass(frozen=True)
class ExpertEpisode:
    """An episode that an expert played, and the tools that it was told of. One with a fault demonstrates nothing."""

    trajectory: Trajectory
    tools: Sequence[JsonSchema]


async def play_expert(
    spec: EnvSpec,
    tasks: Sequence[int],
    config: RolloutConfig,
    *,
    words: Mapping[str, Any] = {},
    split: str = "train",
    measure: CountTokens | None = None,
    on_episode: Callable[[Trajectory], None] | None = None,
) -> list[ExpertEpisode]:
    """Play the expert of an open spec on tasks, many at once; return its episodes in the order of the tasks.

    Args:
        config: the limits of turns and seconds; tokens are not counted.
        words: for the model's chat template, kept with the conversation.
        measure: counts the tokens that a context has for a model: contexts are then folded as ``config`` says.
        on_episode: called with each episode as it ends.

    Raises:
        NoExpertError: the environment has no expert, or none for one of the tasks.
        ContractError: the expert broke its contract.
    """
    async with open_expert_rollout(spec, config, words=words, split=split, measure=measure) as rollout:
        groups = await rollout.batch(tasks, 1, on_episode=on_episode)
    played = [ExpertEpisode(t, _read_tools(t)) for group in groups for t in group]
    for one in played:
        check_ended(one.trajectory, spec, split)
    return played


@asynccontextmanager
async def open_expert_rollout(
    spec: EnvSpec,
    config: RolloutConfig,
    *,
    words: Mapping[str, Any] = {},
    split: str = "train",
    measure: CountTokens | None = None,
) -> AsyncIterator[Rollout]:
    """Open the rollout of an expert, whose turns may be as long as they are. Arguments and errors: `play_expert`."""
    if not spec.has_expert:
        spec.sample().expert()  # says so
    plain = config.model_copy(update={"oversample": 0, "branches": 1, "stop": [], "max_episode_tokens": None})
    if measure is None:
        plain = plain.model_copy(update={"context": "whole", "context_budget": None})
    async with open_task_group() as closing:
        engine = ExpertEngine(lambda close: closing.start_soon(close))
        engine.rollout = rollout = Rollout.from_config(plain, spec, engine, ChatRenderer(words), split)
        if rollout.folding is not None:
            rollout.folding = replace(rollout.folding, measure=measure)
        yield rollout


def check_ended(trajectory: Trajectory, spec: EnvSpec, split: str) -> None:
    """Raise ContractError where an expert used up all turns for less than the best reward."""
    best = spec.sample().best_reward
    if trajectory.stop is Stop.MAX_TURNS and (trajectory.reward is None or trajectory.reward < best):
        raise ContractError(
            f"{spec.cls.__name__}.expert of {describe_task(trajectory.task, split)} took all {trajectory.turns} "
            f"turns and did not end the episode, which earned {trajectory.reward}; end it sooner, or raise max_turns"
        )


def _read_tools(trajectory: Trajectory) -> list[JsonSchema]:
    return decode_conversation(trajectory.segments[0].token_ids)[0] if trajectory.segments else []


class ExpertEngine:
    """An engine that asks the environment's expert for each turn.

    Args:
        close: called with what closes an expert, once its episode has ended.
    """

    capacity = CAPACITY
    max_context = 1 << 40  # bytes
    rollout: Rollout  # whose episodes it plays

    def __init__(self, close: Callable[[Callable[[], Coroutine[Any, Any, None]]], object]) -> None:
        self._close = close
        self._experts: dict[str, _Expert] = {}

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        if session not in self._experts:
            episode = next(e for e in self.rollout.running if e.session == session)
            self._experts[session] = _Expert(episode)
        expert = self._experts[session]
        folded = expert.episode.folded
        asked = None if folded is None else folded.asked
        ids = encode_lines([await (expert.take_turn() if asked is None else expert.summarize(asked))])
        return Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), "stop")

    def end_session(self, session: str) -> None:
        if session in self._experts:
            self._close(self._experts.pop(session).close)

    async def update_weights(self, policy: Any, version: int) -> None: ...

    async def close(self) -> None: ...


class _Expert:
    """The expert of one episode while it plays."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        assert episode.env is not None
        self.env: Env = episode.env
        self.what = f"{type(self.env).__name__}.expert of {describe_task(episode.task, episode.context.split)}"
        self.seen = 0  # messages of the episode
        self.turns: AsyncGenerator[ExpertTurn, list[Message]] | Generator[ExpertTurn, list[Message], None] | None = None

    async def take_turn(self) -> dict[str, Any]:
        """Return the next turn as the API has it.

        Raises:
            ContractError: the expert raises, ends, takes too long, or yields what is no turn.
            InfraError: the world failed it.
        """
        messages = self.episode.messages[self.seen :]
        self.seen = len(self.episode.messages) + 1
        turn = await self._bounded(partial(self._advance, messages))
        return _wire(self._read(turn), self.episode.turn)

    async def summarize(self, messages: list[Message]) -> dict[str, Any]:
        """Return the summary that the environment writes for its expert, as the API has it. Raises as `take_turn`."""
        what = self.what.replace(".expert of", ".summarize of", 1)
        text: object = await self._bounded(partial(self._summarize, messages, what), what)
        if not isinstance(text, str) or not text.strip():
            raise ContractError(f"{what} returned {text!r:.80}; it returns the text of a summary")
        return _wire(Reply(text), self.episode.turn)

    async def _summarize(self, messages: list[Message], what: str) -> object:
        summary: Any = self.env.summarize(messages)
        if not inspect.isawaitable(summary):
            raise ContractError(f"{what} must be `async def` (a plain method is for a class of `sync = True`)")
        return await summary

    async def _bounded(self, act: Callable[[], Awaitable[T]], what: str = "") -> T:
        """Return what the environment's code returns in time. Raises as `take_turn`.

        Args:
            what: the method, as errors name it; the expert by default.
        """
        what, kind = what or self.what, "summary" if what else "turn"
        limit_s = self.episode.context.limits.turn_timeout_s
        with anyio.move_on_after(limit_s):
            try:
                return await act()
            except (UserError, InfraError):
                raise
            except (StopAsyncIteration, _Ended):
                raise ContractError(self._describe_end()) from None
            except (Exception, SystemExit) as error:
                raise ContractError(f"{what} raised {describe_raised(error)}") from error
        raise ContractError(f"{what} took over {limit_s:g} s for a {kind} (rollout.turn_timeout_s)")

    async def _advance(self, messages: list[Message]) -> ExpertTurn:
        """Start the expert, or send it the messages that answered its last turn."""
        if self.turns is None:
            self.turns, messages = self._start(), []
        first, turns = not self.episode.turn, self.turns
        if isinstance(turns, AsyncGenerator):
            return await (anext(turns) if first else turns.asend(messages))
        assert self.env._thread is not None
        return await self.env._thread.run(partial(_send, turns, None if first else messages))

    def _start(self) -> AsyncGenerator[ExpertTurn, list[Message]] | Generator[ExpertTurn, list[Message], None]:
        turns: Any = self.env.expert()
        if inspect.iscoroutine(turns):
            turns.close()
            raise ContractError(f"{self.what} has no `yield`: {_HOW}, turn by turn")
        if isinstance(turns, Generator) and self.env._thread is None:
            raise ContractError(f"{self.what} must be `async def` (a plain generator is for a class of `sync = True`)")
        if not isinstance(turns, AsyncGenerator | Generator):
            raise ContractError(f"{self.what} returned {turns!r:.80}; it must be a generator: {_HOW}, turn by turn")
        return turns

    def _describe_end(self) -> str:
        if not self.episode.turn:
            return f"{self.what} yielded nothing: {_HOW}, turn by turn"
        turns = f"{self.episode.turn} turn{'s' * (self.episode.turn != 1)}"
        return f"{self.what} ended after {turns}, and the episode went on; yield turns until the environment ends it"

    def _read(self, turn: object) -> Reply:
        """Return a turn as a reply. Raises ContractError if it is none, or calls a tool that the model has not."""
        if isinstance(turn, str):
            turn = Reply(turn)
        elif isinstance(turn, ToolCall):
            turn = Reply("", (turn,))
        elif isinstance(turn, Sequence) and turn and all(isinstance(c, ToolCall) for c in turn):
            turn = Reply("", tuple(turn))
        if not isinstance(turn, Reply):
            raise ContractError(f"{self.what} yielded {turn!r:.80}; {_HOW}")
        known = [t.name for t in self.env.tool_list]
        for call in turn.tool_calls:
            if call.name not in known:
                have = f"the tools are: {', '.join(known)}" if known else "there are no tools"
                raise ContractError(f"{self.what} called {call.name!r}; {have}{suggest(call.name, known)}")
            try:
                json.dumps(call.arguments)
            except (TypeError, ValueError) as error:
                raise ContractError(f"{self.what}: the arguments of {call.name!r} are no JSON: {error}") from None
        return turn

    async def close(self) -> None:
        """Close the generator, so that what it holds open is closed."""
        try:
            if isinstance(self.turns, AsyncGenerator):
                await self.turns.aclose()
            elif self.turns is not None:
                with suppress(ValueError):  # it runs on in a thread that was left behind
                    self.turns.close()
        except (Exception, SystemExit) as error:
            raise ContractError(f"{self.what} raised {describe_raised(error)} when it was closed") from error


class _Ended(Exception):
    """A plain generator ended: no coroutine may raise StopIteration."""


def _send(turns: Generator[ExpertTurn, list[Message], None], messages: list[Message] | None) -> ExpertTurn:
    try:
        return next(turns) if messages is None else turns.send(messages)
    except StopIteration:
        raise _Ended from None


def _wire(reply: Reply, turn: int) -> dict[str, Any]:
    """Convert a turn to the API's form, with an id for each call."""
    message: dict[str, Any] = {"role": "assistant", "content": to_utf8(reply.content)}
    if reply.tool_calls:
        calls = [(c.name, json.dumps(to_utf8_json(dict(c.arguments)))) for c in reply.tool_calls]
        text = json.dumps([turn, reply.content, calls])
        message["tool_calls"] = [
            {"id": make_call_id(text, i), "type": "function", "function": {"name": name, "arguments": given}}
            for i, (name, given) in enumerate(calls)
        ]
    return message
