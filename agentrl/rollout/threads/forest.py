"""The threads of an episode that requests play: each goes on with a conversation, in the tokens that were sampled.

A request goes on from the turn that its history ends with, by the renderer's bridge: what was sampled is never rendered
again. One that goes on from no turn, or from one that another went on from, opens a thread, which is a context of the
episode; the learner computes what threads share once. Each sampled token is in one thread, and is trained once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentrl.errors import TemplateError
from agentrl.renderer import HistoryRewriter, Renderer
from agentrl.renderer.call_formats.hermes import make_call_id
from agentrl.rollout.routed_experts import ask_for_experts
from agentrl.rollout.seeds import mix_seeds
from agentrl.rollout.threads.conversation import (
    Digest,
    TurnEnd,
    TurnTree,
    extend_digest,
    same_arguments,
    to_message,
)
from agentrl.rollout.threads.open_thread import OpenThread, describe_threads, find_caller
from agentrl.rollout.turn_rendering import render_behind, write_turn
from agentrl.types import JsonSchema, Message, Reply, SamplingParams, Segment, Stop, Thread, ToolCall, to_utf8_json

if TYPE_CHECKING:
    from agentrl.rollout.episode import EpisodeContext

INVALID_CALL = "invalid_tool_call"  # the name of a call on the wire of which none can be read


class TurnRefused(Exception):
    """A request that is answered by an error: a word for programs, and a sentence."""

    def __init__(self, code: str, sentence: str, stop: Stop | None = None) -> None:
        super().__init__(sentence)
        self.code, self.stop = code, stop


@dataclass(frozen=True)
class SampledTurn:
    """A turn that answers a request.

    Args:
        message: the reply, as it goes over the wire: calls with their arguments as text.
        prompt_tokens: of the context that it was sampled in.
        number: among the turns of the episode.
    """

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    number: int = 0


@dataclass(frozen=True)
class PlayedThreads:
    """The threads of an episode, as its row has them.

    Args:
        segments: of all threads, one behind the other.
        order: the numbers of the turns in them, in the order of time.
        threads: where each comes from; empty: there is one.
        count, side_calls: of the threads that have a turn, and of those that are side calls.
    """

    segments: list[Segment]
    order: list[int]
    threads: tuple[Thread, ...]
    count: int
    side_calls: int


@dataclass(eq=False)
class ThreadForest:
    """The threads of one episode, and the turns that are sampled in them.

    Args:
        context: the engine, the sampling and the limits of the run.
        session: the engine's word for the episode, whose cache it keeps.
        most_turns: of a conversation; None: any number.
        answering: entered while a request is answered that no other one answers.
        goes_on_when_cut: a turn that ran out of tokens ends nothing: who goes on from it opens another thread.
        other_tokens: counts the episode's tokens behind prompts that are in no thread; max_episode_tokens is of these
            and of all threads together. None: it is of each conversation alone.
    """

    context: EpisodeContext
    renderer: Renderer
    seed: int
    session: str
    most_turns: int | None = None
    answering: Callable[[], AbstractContextManager[None]] = nullcontext
    goes_on_when_cut: bool = False
    other_tokens: Callable[[], int] | None = None
    threads: list[OpenThread] = field(default_factory=list)
    turns: int = 0  # that were sampled, in all threads
    turn_ended: float = 0.0  # when, by the run's clock: the last one; before it, what is before the first request
    over: Stop | None = None  # no more turns, and why
    past: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # conversations, by the answers that ended them
    calls: dict[str, tuple[ToolCall, int, str]] = field(default_factory=dict)  # by the id on the wire: turn, arguments
    answers: dict[str, Message] = field(default_factory=dict)  # that the environment's tools gave, by the same
    _tree: TurnTree = field(default_factory=TurnTree)
    _names: dict[str, str] = field(default_factory=dict)  # of the tools that were called, by the ids of the calls
    _in_flight: dict[Digest, asyncio.Future[SampledTurn]] = field(default_factory=dict)

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[JsonSchema],
        *,
        is_retry: bool | None = None,
        sampling: SamplingParams | None = None,
        speaker: bytes = b"",
    ) -> SampledTurn:
        """Sample the turn that a request asks for.

        Args:
            is_retry: it was sent before: what answered that answers this. None: not known, and so where that one is
                being answered.
            sampling: of this turn, its seed too; None: the run's.
            speaker: who asks, where that is known: nobody goes on from another one's turn, though they say the same.

        Raises:
            TurnRefused: there is none, and why.
        """
        if not messages:
            raise TurnRefused("invalid_request", "messages: there is none to answer")
        try:
            digests = self._tree.digest(messages, speaker)
        except (KeyError, TypeError, AttributeError) as error:
            sentence = f"messages: one is not in the dialect's shape ({type(error).__name__}: {error})"
            raise TurnRefused("invalid_request", sentence) from None
        digest = extend_digest(digests[-1], {"role": "tools", "content": repr(tools)})
        while (same := self._in_flight.get(digest)) is not None and (
            is_retry or (is_retry is None and not same.done())
        ):
            with suppress(asyncio.CancelledError):
                return await asyncio.shield(same)
            if not same.cancelled():  # this request is cancelled, and not the one before it
                raise asyncio.CancelledError
        future: asyncio.Future[SampledTurn] = asyncio.get_running_loop().create_future()
        self._in_flight[digest] = future
        try:
            with self.answering():
                turn = await self._sample(messages, tools, digests, sampling)
        except BaseException:
            future.cancel()
            if self._in_flight.get(digest) is future:
                del self._in_flight[digest]
            raise
        future.set_result(turn)
        return turn

    def name_session(self, branch: int) -> str:
        """Return the engine's word for a branch, each of which has a cache of its own."""
        return f"{self.session}.{branch}" if branch else self.session

    async def _sample(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[JsonSchema],
        digests: Sequence[Digest],
        sampling: SamplingParams | None,
    ) -> SampledTurn:
        most = self.context.limits.max_episode_tokens
        if most is not None and self.over is None and self._count_tokens() >= most:
            self.over = Stop.MAX_TOKENS
        if self.over is not None:
            raise TurnRefused("episode_over", f"the episode is over ({self.over.value})")
        parent, known = self._tree.find(digests)
        new = self._read_messages(messages[known:])
        before = None if parent is None else self.threads[parent.thread]
        marks = (0, 0) if before is None else (len(before.messages), len(before.segments))
        was_extended = parent is not None and parent.extended
        try:
            thread = self._extend(before, parent, new, tools) if before and parent else self._open(new, tools)
        except TemplateError as error:
            raise TurnRefused("invalid_request", f"messages: {error}") from None
        done = False
        try:
            turn = await self._generate_in(thread, digests[-1], sampling)
            done = True
            return turn
        finally:
            if not done and parent is not None:
                parent.extended = was_extended
                if thread is before:
                    thread.cut(*marks)

    async def _generate_in(self, thread: OpenThread, digest: Digest, own: SamplingParams | None) -> SampledTurn:
        context, limits, prompt = self.context, self.context.limits, thread.token_ids.copy()
        if self.most_turns is not None and thread.depth >= self.most_turns:
            self.over = Stop.MAX_TURNS
            raise TurnRefused("episode_over", f"the {self.most_turns} turns of an episode are over")
        sampling = own or self._run_sampling(thread)
        room = min(sampling.max_tokens, context.engine.max_context - len(prompt))
        if limits.max_episode_tokens is not None:
            room = min(room, limits.max_episode_tokens - self._count_tokens(thread))
        if room <= 0:
            sentence = f"{len(prompt)} tokens of context leave no room for a turn"
            raise TurnRefused("context_length_exceeded", sentence, Stop.MAX_TOKENS)
        params = replace(
            sampling,
            max_tokens=room,
            stop_token_ids=tuple(self.renderer.get_stop_token_ids()),
        )
        params = ask_for_experts(params, thread.segments)
        started = context.lanes.clock()
        completion = await context.engine.generate(prompt, params, session=self.name_session(thread.branch))
        seconds = context.lanes.clock() - started
        if params.stop is not None:
            completion = params.stop.cut_completion(completion)
        context.tokens += len(completion.token_ids)
        thread.append(completion.segment())
        stop = params.stop.strings if params.stop is not None else ()
        reply = self.renderer.parse_response(completion.token_ids, prompt_ids=prompt, tools=thread.tools, stop=stop)
        thread.messages.append(reply.message())
        thread.history.append(write_turn(self.renderer, reply, completion.token_ids))
        thread.turns.append(self.turns)
        thread.reply = reply
        thread.depth += 1
        message = self._write_message(reply, completion.token_ids)
        end = len(thread.token_ids), len(thread.messages), len(completion.token_ids)
        thread.is_cut = completion.stop_reason == "length"  # nothing can be put behind it
        if not thread.is_cut:
            self._tree.add(digest, message, TurnEnd(self.threads.index(thread), self.turns, *end, thread.depth))
        self.turns += 1
        before, self.turn_ended = self.turn_ended, context.lanes.clock()
        context.record_turn(seconds, max(0.0, self.turn_ended - before - seconds))
        finish = "tool_calls" if reply.tool_calls else "stop"
        if thread.is_cut:
            finish = "length"
            if not self.goes_on_when_cut:
                self.over = Stop.MAX_TOKENS
        return SampledTurn(message, finish, len(prompt), completion.token_ids, completion.logprobs, self.turns - 1)

    def count_behind(self, thread: OpenThread | None = None) -> int:
        """Count the tokens behind the prompts of all threads that have a turn, or are about to."""
        return sum(t.behind for t in self.threads if t.turns or t is thread)

    def _count_tokens(self, thread: OpenThread | None = None) -> int:
        """Count the tokens that are within max_episode_tokens, before a thread's next turn."""
        if self.other_tokens is not None:
            return self.other_tokens() + self.count_behind(thread)
        return thread.behind if thread is not None else 0

    def _run_sampling(self, thread: OpenThread) -> SamplingParams:
        """Return the run's own sampling of a thread's next turn."""
        sampling, branch = self.context.sampling, [thread.branch] if thread.branch else []
        seed = mix_seeds(self.seed, thread.depth, sampling.seed, *branch)
        return replace(sampling, max_tokens=self.context.limits.max_tokens, seed=seed)

    def _read_messages(self, given: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Read messages of a request; answers of the environment's tools are those that it gave."""
        read = list[Message]()
        for one in given:
            try:
                message = to_message(one, self._names)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TurnRefused("invalid_request", f"messages: {error}") from None
            own = self.answers.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
            given_back = own is not None and own["content"] == message["content"]
            read.append(own if own is not None and given_back else self._restore_ids(message))
        return read

    def _restore_ids(self, message: Message) -> Message:
        """Give a message of a request the calls' own ids, which are not unique in an episode."""
        if "tool_call_id" in message:
            message["tool_call_id"] = self._find_own_id(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = self._find_own_id(call["id"])
        return message

    def _find_own_id(self, wire: str) -> str:
        return self.calls[wire][0].id if wire in self.calls else wire

    def _open(self, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> OpenThread:
        """Open a thread of a conversation that goes on from none."""
        thread = OpenThread(1 + max((t.branch for t in self.threads), default=-1), tools, opened=True)
        thread.source, thread.begun = find_caller(self.threads, messages), len(messages)
        thread.after = thread.source.turns[-1] if thread.source is not None else None
        thread.was_offered = bool(tools)
        self.context.offered_tools.add(tools)
        thread.append(Segment("prompt", tuple(self.renderer.render_ids(messages, tools=tools))))
        thread.add_messages(messages)
        self.threads.append(thread)
        return thread

    def _extend(
        self, thread: OpenThread, parent: TurnEnd, messages: Sequence[Message], tools: Sequence[JsonSchema]
    ) -> OpenThread:
        """Put messages behind a turn; where its thread has gone on already, in a fork that begins with its tokens."""
        token_ids, renderer = thread.token_ids.take(parent.end), self.renderer
        prompt = token_ids.take(parent.end - parent.sampled)
        completion = token_ids[parent.end - parent.sampled :]
        history = thread.history[: parent.messages]
        branch = thread.branch
        if parent.extended:
            branch = 1 + max(t.branch for t in self.threads)
        beginning: tuple[int, ...] | None = tuple(token_ids) if branch != thread.branch else None
        added: Sequence[int] = ()
        anew = None
        if isinstance(renderer, HistoryRewriter):
            anew = renderer.rewrite_history(prompt, completion, history, messages, tools=tools)
        if anew is not None:
            beginning, added = tuple(anew.history), anew.observation
        else:
            added = render_behind(renderer, prompt, completion, messages, tools)
        parent.extended = True
        if beginning is not None:
            shown = thread.messages[: parent.messages]
            source, depth, begun = thread, parent.depth, len(shown)
            thread = OpenThread(branch, tools, opened=False, history=history, messages=shown, depth=depth, begun=begun)
            thread.source, thread.after, thread.was_offered = source, parent.turn, source.was_offered
            thread.append(Segment("prompt", beginning))
            self.threads.append(thread)
        if added:
            thread.append(Segment("env", tuple(added)))
        thread.tools, thread.folded = tools, False
        thread.was_offered |= bool(tools)
        thread.add_messages(messages)
        return thread

    def _write_message(self, reply: Reply, token_ids: Sequence[int]) -> dict[str, Any]:
        """Write a reply for the wire. A call that cannot be made keeps what the model wrote: the agent says why.

        A call's own id is made of its turn's text: where an earlier call of the episode has it, it is given another.
        """
        calls = []
        for call in reply.tool_calls:
            text = json.dumps(to_utf8_json(dict(call.arguments)))
            if call.error is not None and call.span is not None:
                text = self.renderer.decode(token_ids[slice(*call.span)]).strip()
            name = call.name or INVALID_CALL
            wire = call.id if call.id not in self.calls else make_call_id(call.id, len(self.calls))
            calls.append({"id": wire, "type": "function", "function": {"name": name, "arguments": text}})
            self.calls[wire], self._names[wire] = (call, self.turns, text), call.name
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if calls else "")}
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if calls:
            message["tool_calls"] = calls
        return message

    # -- the whole -----------------------------------------------------------------------------------------------------

    def find_main(self) -> OpenThread:
        """Find the thread whose last turn is the answer: the last one to which tools were offered, where one was."""
        played = [t for t in self.threads if t.turns]
        return max([t for t in played if t.was_offered] or played, key=lambda t: t.turns[-1])

    def _find_side_calls(self, played: Sequence[OpenThread]) -> set[int]:
        """Find titles, summaries for the screen: one turn, apart from the others, without their tools."""
        if not any(t.was_offered for t in played):
            return set()
        gone_on_from = {t.source for t in played if not t.opened}
        alone = (t.opened and not t.was_offered and len(t.turns) == 1 and t not in gone_on_from for t in played)
        return {number for number, is_alone in enumerate(alone) if is_alone}

    def collect(self) -> PlayedThreads:
        """Return the threads so far: one behind the other, in the order in which they were opened."""
        played = [t for t in self.threads if t.turns]
        segments, order = list[Segment](), list[int]()
        sides = self._find_side_calls(played)
        for number, thread in enumerate(played):
            if number in sides:  # seen, and not trained: it did not serve the task
                segments.append(Segment("prompt", tuple(thread.token_ids)))
            else:
                segments += thread.segments
                order += thread.turns
        threads = describe_threads(played, self.find_main(), sides) if played else ()
        return PlayedThreads(segments, order, threads, len(played), len(sides))

    def count_invalid_calls(self) -> int:
        """Count the calls that could not be read, or made."""
        return sum(call.error is not None for call, *_ in self.calls.values())

    def find_call(self, name: str, arguments: Mapping[str, Any] | str) -> tuple[str, ToolCall, int]:
        """Find the model's call that an agent makes: the first that is the same and has no answer.

        Returns:
            Its id on the wire, the call, and its turn.
        """
        for key, (call, turn, text) in self.calls.items():
            if key in self.answers:
                continue
            if name == call.name and same_arguments(text, arguments) if call.name else name == INVALID_CALL:
                self.answers[key] = {"role": "tool", "content": ""}  # until there is one
                return key, call, turn
        number = f"agent{len(self.answers):05d}"
        self.answers[number] = {"role": "tool", "content": ""}
        turn = max(self.turns - 1, 0)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
                if not isinstance(arguments, dict):
                    raise ValueError("they are no object")
            except ValueError as error:
                why = f"the arguments are no JSON object: {error}"
                return number, ToolCall(number, name, error=why, kind="invalid"), turn
        return number, ToolCall(number, name, arguments), turn
