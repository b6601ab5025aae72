"""An episode that somebody else's agent plays, through an endpoint: its requests are the turns.

A request goes on from the turn that its history ends with, by the renderer's bridge: what was sampled is never rendered
again. One that goes on from no turn, or from one that another went on from, opens a thread, which is a context of the
episode; the learner computes what threads share once. Each sampled token is in one thread, and is trained once.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.environments.env import Env, ToolEnv
from agentrl.environments.validation import as_messages, validate_rewards, validate_step
from agentrl.errors import InfraError, TemplateError
from agentrl.gateway.conversation import Digest, TurnEnd, TurnTree, same_arguments, to_message
from agentrl.gateway.open_thread import OpenThread, describe_threads, find_caller
from agentrl.renderer import HistoryRewriter
from agentrl.rollout.episode import Branching, Episode, EpisodeContext, mix_seeds, render_behind
from agentrl.types import JsonSchema, Message, Observation, Reply, Segment, Stop, ToolCall, Trajectory

if TYPE_CHECKING:
    from agentrl.gateway.gateway import Gateway

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
    """

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


class AgentEpisode(Episode):
    """One episode that an agent plays. ``key`` is its API key."""

    def __init__(
        self,
        context: EpisodeContext,
        task: int,
        seed: int,
        options: Mapping[str, Any] | None = None,
        *,
        gateway: Gateway,
        key: str,
    ) -> None:
        super().__init__(context, task, seed, options)
        self.gateway, self.key = gateway, key
        self.threads: list[OpenThread] = []
        self.tree = TurnTree()
        self.over: Stop | None = None  # no more turns, and why
        self.past: dict[str, list[dict[str, Any]]] = {}  # conversations, by the answers that ended them
        self.requests = Counter[str]()  # by their dialects
        self._refused: Stop | None = None  # why a request was refused that the episode does not end by
        self._calls: dict[str, tuple[ToolCall, int, str]] = {}  # of the model, by id: its turn, its arguments as sent
        self._names: dict[str, str] = {}  # of the tools that were called, by the ids of the calls
        self._answers: dict[str, Message] = {}  # of the environment's tools, by the call's id
        self._turn_rewards: dict[int, float] = {}
        self._in_flight: dict[Digest, asyncio.Future[SampledTurn]] = {}
        self._requests: set[asyncio.Task[Any]] = set()
        self._doing = 0  # requests that are being answered
        self._has_ended = False  # the agent
        self._turn_ended = self.clock()  # the last one; before it, what is before the agent
        self._failure: tuple[BaseException, str] | None = None  # of ours, and at which stage
        self._playing = anyio.CancelScope()
        self._stepping = asyncio.Lock()

    async def _play(self, until: Branching | None) -> bool:
        env = await self._reset()
        url = f"{self.gateway.mcp_url}/{self.key}" if self.gateway.mcp_url else ""
        task = AgentTask(list(self.messages), list(self.tools), self.gateway.base_url, self.key, url)
        ending = AgentEnding()
        self._turn_ended = self.clock()
        self._switch("agent")
        try:
            with self._playing:
                ending = await self.gateway.agent.run(task)
        finally:
            closed, self.over = self.over, self.over or Stop.TERMINATED
            await self._stop_requests()
            self._switch("")
            self._has_ended = True
        if self._failure is not None:
            error, self.stage = self._failure
            raise error
        self.gateway.record_ending(ending)
        if not self.turn or ending.killed:
            before = "" if self.turn else ", before it made a request"
            raise InfraError("agent", f"{ending.error or 'the agent ended'}{before}\n{ending.trace}".rstrip())
        if closed is not None:
            self.stop = closed
        elif ending.error:
            self.stop = self._refused or Stop.AGENT_ERROR
            self.info["agent_error"] = f"{ending.error}\n{ending.trace}".rstrip()
        else:
            self.stop = Stop.TERMINATED
        self.messages = self._find_main().messages
        if closed is None:
            await self._answer_last(env)
        with self._stage("score"):
            rewards = await self._bounded(env.score(self.trajectory()))
            self.rewards = validate_rewards(rewards, env)
        return False

    async def _answer_last(self, env: Env) -> None:
        """Let the environment answer the turn by which the agent ended, where it calls nothing."""
        main = self._find_main()
        if main.reply is None or main.reply.tool_calls:
            return
        with self._stage("tools"):
            step = validate_step(await self._bounded(env.step(main.reply)), env)
        self._turn_rewards[main.turns[-1]] = self._turn_rewards.get(main.turns[-1], 0.0) + float(step.reward)
        self.info |= step.info

    def _observe(self, observation: Observation, tools: Sequence[JsonSchema]) -> None:
        """Keep the first observation: the agent's first request is the prompt."""
        self.messages.extend(as_messages(observation))
        self.tools = tools

    def _find_main(self) -> OpenThread:
        """Find the thread whose last turn is the answer: the last one to which tools were offered, where one was."""
        played = [t for t in self.threads if t.turns]
        return max([t for t in played if t.tools] or played, key=lambda t: t.turns[-1])

    def _is_side_call(self, thread: OpenThread) -> bool:
        """Return True for a title, a summary for the screen: one turn, apart from the others, without their tools."""
        has_tools = any(t.tools for t in self.threads if t.turns)
        return has_tools and thread.opened and not thread.tools and len(thread.turns) == 1

    async def _stop_requests(self) -> None:
        for request in self._requests:
            request.cancel()
        if self._requests:
            await asyncio.wait(self._requests)

    def _fail(self, error: BaseException, stage: str) -> None:
        """End the episode by an error that is not the agent's: the engine's, the renderer's, the environment's."""
        if self._failure is None:
            self._failure = error, stage
            self._playing.cancel()

    @contextmanager
    def _answering(self, stage: str) -> Iterator[None]:
        """Hold a request's task and stage while it is answered; an error of ours ends the episode."""
        request = asyncio.current_task()
        assert request is not None
        started = self.clock()
        self._requests.add(request)
        if not self._doing:
            self._switch(stage)
        self._doing += 1
        try:
            yield
        except TurnRefused as refusal:
            self._refused = refusal.stop or self._refused
            raise
        except Exception as error:
            self._fail(error, stage)
            raise
        finally:
            self.timings[stage] += self.clock() - started
            self._requests.discard(request)
            self._doing -= 1
            if not self._doing:
                self._switch("agent")

    def _switch(self, stage: str) -> None:
        """Leave the lane that the episode is in, and enter that of another stage: a request's, the agent's, or none."""
        if self._has_ended:  # and a request comes late
            return
        now = self.clock()
        if self.track.owner:
            self.track.leave(now)
            if self.stage == "agent":
                self.timings["agent"] += now - self.since
        self.stage, self.since = stage or self.stage, now
        if stage:
            self.track.enter(stage, now)

    async def close(self) -> None:
        self.gateway.forget(self.key)
        for branch in {t.branch for t in self.threads} - {0}:
            self.context.engine.end_session(self._name_session(branch))
        await super().close()

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonSchema], *, is_retry: bool | None = None
    ) -> SampledTurn:
        """Sample the turn that a request asks for.

        Args:
            is_retry: it was sent before: what answered that answers this. None: not known, and so where that one is
                being answered.

        Raises:
            TurnRefused: there is none, and why.
        """
        if not messages:
            raise TurnRefused("invalid_request", "messages: there is none to answer")
        try:
            digests = self.tree.digest(messages)
        except (KeyError, TypeError, AttributeError) as error:
            sentence = f"messages: one is not in the dialect's shape ({type(error).__name__}: {error})"
            raise TurnRefused("invalid_request", sentence) from None
        digest = digests[-1]
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
            with self._answering("generate"):
                turn = await self._sample(messages, tools, digests)
        except BaseException:
            future.cancel()
            if self._in_flight.get(digest) is future:
                del self._in_flight[digest]
            raise
        future.set_result(turn)
        return turn

    def _name_session(self, branch: int) -> str:
        return f"{self.session}.{branch}" if branch else self.session

    async def _sample(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonSchema], digests: Sequence[Digest]
    ) -> SampledTurn:
        if self.over is not None:
            raise TurnRefused("episode_over", f"the episode is over ({self.over.value})")
        parent, known = self.tree.find(digests)
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
            turn = await self._generate_in(thread, digests[-1])
            done = True
            return turn
        finally:
            if not done and parent is not None:
                parent.extended = was_extended
                if thread is before:
                    thread.cut(*marks)

    async def _generate_in(self, thread: OpenThread, digest: Digest) -> SampledTurn:
        context, limits, prompt = self.context, self.context.limits, thread.token_ids.copy()
        most_turns = limits.max_turns or (self.env.max_turns if self.env is not None else 1)
        if thread.depth >= most_turns:
            self.over = Stop.MAX_TURNS
            raise TurnRefused("episode_over", f"the {most_turns} turns of an episode are over")
        room = min(limits.max_tokens, context.engine.max_context - len(prompt))
        if limits.max_episode_tokens is not None:
            room = min(room, limits.max_episode_tokens - (len(prompt) - len(thread.segments[0].token_ids)))
        if room <= 0:
            sentence = f"{len(prompt)} tokens of context leave no room for a turn"
            raise TurnRefused("context_length_exceeded", sentence, Stop.MAX_TOKENS)
        params = replace(
            context.sampling,
            max_tokens=room,
            stop_token_ids=tuple(self.renderer.get_stop_token_ids()),
            seed=mix_seeds(self.seed, thread.depth, context.sampling.seed, *([thread.branch] if thread.branch else [])),
        )
        started = self.clock()
        completion = await context.engine.generate(prompt, params, session=self._name_session(thread.branch))
        seconds = self.clock() - started
        if params.stop is not None:
            completion = params.stop.cut_completion(completion)
        context.tokens += len(completion.token_ids)
        thread.append(Segment("model", completion.token_ids, completion.logprobs, completion.versions, completion.kept))
        stop = params.stop.strings if params.stop is not None else ()
        reply = self.renderer.parse_response(completion.token_ids, prompt_ids=prompt, tools=thread.tools, stop=stop)
        thread.messages.append(reply.message())
        thread.history.append(self._write_turn(reply, completion.token_ids))
        thread.turns.append(self.turn)
        thread.reply = reply
        thread.depth += 1
        message = self._write_message(reply, completion.token_ids)
        end = len(thread.token_ids), len(thread.messages), len(completion.token_ids)
        self.tree.add(digest, message, TurnEnd(self.threads.index(thread), self.turn, *end, thread.depth))
        self.turn += 1
        before, self._turn_ended = self._turn_ended, self.clock()
        context.record_turn(seconds, max(0.0, self._turn_ended - before - seconds))
        finish = "tool_calls" if reply.tool_calls else "stop"
        if completion.stop_reason == "length":
            self.over, finish = Stop.MAX_TOKENS, "length"  # nothing can be put behind a turn that was cut
        return SampledTurn(message, finish, len(prompt), completion.token_ids, completion.logprobs)

    def _read_messages(self, given: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Read messages of a request; answers of the environment's tools are those that it gave."""
        read = list[Message]()
        for one in given:
            try:
                message = to_message(one, self._names)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TurnRefused("invalid_request", f"messages: {error}") from None
            own = self._answers.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
            read.append(own if own is not None and own["content"] == message["content"] else message)
        return read

    def _open(self, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> OpenThread:
        """Open a thread of a conversation that goes on from none."""
        thread = OpenThread(1 + max((t.branch for t in self.threads), default=-1), tools, opened=True)
        thread.source, thread.begun = find_caller(self.threads, messages), len(messages)
        thread.after = thread.source.turns[-1] if thread.source is not None else None
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
            thread.source, thread.after = source, parent.turn
            thread.append(Segment("prompt", beginning))
            self.threads.append(thread)
        if added:
            thread.append(Segment("env", tuple(added)))
        thread.tools, thread.folded = tools, False
        thread.add_messages(messages)
        return thread

    def _write_message(self, reply: Reply, token_ids: Sequence[int]) -> dict[str, Any]:
        """Write a reply for the wire. A call that cannot be made keeps what the model wrote: the agent says why."""
        calls = []
        for call in reply.tool_calls:
            text = json.dumps(dict(call.arguments))
            if call.error is not None and call.span is not None:
                text = self.renderer.decode(token_ids[slice(*call.span)]).strip()
            name = call.name or INVALID_CALL
            calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": text}})
            self._calls[call.id], self._names[call.id] = (call, self.turn, text), call.name
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if calls else "")}
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if calls:
            message["tool_calls"] = calls
        return message

    # -- the environment's tools ---------------------------------------------------------------------------------------

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Run a tool of the environment for the agent; return its answer.

        Raises:
            TurnRefused: the episode is over, or the environment has no tools.
        """
        env = self.env
        if self.over is not None or env is None:
            raise TurnRefused("episode_over", "the episode is over")
        if not isinstance(env, ToolEnv):
            raise TurnRefused("invalid_request", f"env {self.context.spec.name!r} has no tools")
        call, turn = self._find_call(name, arguments)
        with self._answering("tools"):
            if type(env).step is ToolEnv.step:  # calls of a turn run together, as they do without an agent
                return await self._step(env, call, turn)
            async with self._stepping:
                return await self._step(env, call, turn)

    async def _step(self, env: ToolEnv, call: ToolCall, turn: int) -> str:
        env._turn = turn
        step = validate_step(await self._bounded(env.step(Reply("", (call,)))), env)
        self._turn_rewards[turn] = self._turn_rewards.get(turn, 0.0) + float(step.reward)
        self.info |= step.info
        messages = as_messages(step.observation)
        if len(messages) == 1 and messages[0]["role"] == "tool":
            self._answers[call.id] = messages[0]
        if step.terminated or step.truncated:
            self.over = Stop.TERMINATED if step.terminated else Stop.TRUNCATED
        return "\n".join(m["content"] for m in messages)

    def _find_call(self, name: str, arguments: Mapping[str, Any] | str) -> tuple[ToolCall, int]:
        """Find the model's call that an agent makes, and its turn: the first that is the same and has no answer."""
        for key, (call, turn, text) in self._calls.items():
            if key in self._answers:
                continue
            if name == call.name and same_arguments(text, arguments) if call.name else name == INVALID_CALL:
                self._answers[key] = {"role": "tool", "content": ""}  # until there is one
                return call, turn
        number = f"agent{len(self._answers):05d}"
        self._answers[number] = {"role": "tool", "content": ""}
        turn = max(self.turn - 1, 0)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
                if not isinstance(arguments, dict):
                    raise ValueError("they are no object")
            except ValueError as error:
                return ToolCall(number, name, error=f"the arguments are no JSON object: {error}", kind="invalid"), turn
        return ToolCall(number, name, arguments), turn

    # -- the whole -----------------------------------------------------------------------------------------------------

    def trajectory(self) -> Trajectory:
        """Return the episode so far: its threads one behind the other, in the order in which they were opened."""
        played = [t for t in self.threads if t.turns]
        segments, order = list[Segment](), list[int]()
        sides = {number for number, thread in enumerate(played) if self._is_side_call(thread)}
        for number, thread in enumerate(played):
            if number in sides:  # seen, and not trained: it did not serve the task
                segments.append(Segment("prompt", tuple(thread.token_ids)))
            else:
                segments += thread.segments
                order += thread.turns
        self.segments = segments
        self.step_rewards = [self._turn_rewards.get(number, 0.0) for number in order]
        place = {number: index for index, number in enumerate(order)}
        made = super().trajectory()
        calls = tuple(replace(c, turn=place.get(c.turn, max(len(order) - 1, 0))) for c in made.calls)
        invalid = sum(call.error is not None for call, *_ in self._calls.values())
        metrics = {**made.metrics, "agent/threads": float(len(played)), "agent/side_calls": float(len(sides))}
        metrics["agent/invalid_calls"] = float(invalid)
        threads = describe_threads(played, self._find_main(), sides) if played else ()
        return replace(made, calls=calls, metrics=metrics, threads=threads)
