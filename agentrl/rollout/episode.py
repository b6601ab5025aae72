"""An episode while it runs: generate -> environment -> generate ...

The context handed to the engine is exactly the concatenation of the segments so far, from the last prompt on; what the
model sampled is never encoded again to be trained.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import anyio

from agentrl.environments.env import Env, ToolEnv
from agentrl.environments.spec import EnvSpec
from agentrl.environments.sync_env import thread_methods
from agentrl.environments.task_sampler import describe_task
from agentrl.environments.validation import (
    as_messages,
    check_attributes,
    check_records,
    validate_reset,
    validate_rewards,
    validate_step,
)
from agentrl.errors import ConfigError, ContractError, InfraError, UserError, is_failure
from agentrl.renderer import HistoryRewriter, Renderer
from agentrl.rollout.concurrency import ConcurrencyLimiter
from agentrl.rollout.engine_protocol import Engine
from agentrl.rollout.folding import FoldedContexts, Folding
from agentrl.rollout.provenance import EndedEpisodes
from agentrl.rollout.routed_experts import ask_for_experts
from agentrl.rollout.seeds import mix_seeds
from agentrl.rollout.sub_agents import SubAgents, list_spawns
from agentrl.rollout.token_context import TokenContext
from agentrl.rollout.turn_rendering import render_behind, write_turn
from agentrl.runtime.lanes import Lanes, Track
from agentrl.tools.offered_tools import OfferedTools
from agentrl.tools.provenance import HealthProbe
from agentrl.types import (
    Completion,
    Fault,
    JsonSchema,
    Message,
    Observation,
    Reply,
    SamplingParams,
    Segment,
    Step,
    Stop,
    Trajectory,
)

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode. Deadlines nest: a tool's < the environment's turn < the episode's."""

    max_turns: int | None = None  # None: the environment's own
    max_tokens: int = 512
    turn_timeout_s: float = 120.0
    episode_timeout_s: float = 600.0
    max_episode_tokens: int | None = None  # behind the prompt, the environment's too


@dataclass(frozen=True)
class Branching:
    """Episodes that share their beginning: after ``turn`` turns one becomes ``branches``, by ``Env.clone``."""

    turn: int
    branches: int


BeginEpisode = Callable[["EpisodeContext", int, int, Mapping[str, Any] | None], "Episode"]


@dataclass
class EpisodeContext:
    """The parts that all episodes of a run share.

    ``reset`` and ``score`` of an environment are bounded by ``turn_timeout_s`` as ``step`` is.
    """

    spec: EnvSpec
    engine: Engine
    renderer: Renderer
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    split: str = "train"
    options: Mapping[str, Any] = field(default_factory=dict)
    turns: int = 0  # that have ended, of all episodes
    tokens: int = 0  # that were sampled in them
    running: set[Episode] = field(default_factory=set)
    lanes: Lanes = field(default_factory=Lanes)
    offered_tools: OfferedTools = field(default_factory=OfferedTools)
    ended: EndedEpisodes = field(default_factory=EndedEpisodes)
    probe: HealthProbe = field(default_factory=HealthProbe)
    folding: Folding | None = None  # of contexts past a budget; None: each episode has one, however long
    begin: BeginEpisode | None = None  # an episode that plays otherwise than by itself

    def __post_init__(self) -> None:
        self.concurrency = ConcurrencyLimiter(self.engine.capacity)

    def begin_episode(self, task: int, seed: int, options: Mapping[str, Any] | None = None) -> Episode:
        """Begin an episode of a task. Raises ConfigError: the environment plays it itself, and has no endpoint."""
        if self.begin is None and self.spec.brings_agent:
            raise ConfigError(
                f"env {self.spec.name!r} plays its episodes itself, against the policy of a run: agentrl train, "
                "agentrl eval --model and agentrl check env have one for it"
            )
        return (self.begin or Episode)(self, task, seed, options)

    def record_turn(self, engine_s: float, other_s: float) -> None:
        """Count a turn that has ended; the concurrency limit follows its seconds with the engine and elsewhere."""
        self.turns += 1
        self.concurrency.record_turn(engine_s, other_s)


class Episode:
    """One episode while it runs. ``stage`` and ``since`` say what it is doing, and since when."""

    def __init__(self, context: EpisodeContext, task: int, seed: int, options: Mapping[str, Any] | None = None) -> None:
        self.context, self.task, self.seed, self.options = context, task, seed, options or {}
        self.session = f"{task}-{seed:x}-{next(_count)}"
        self.env: Env | None = None
        self.segments: list[Segment] = []
        self.messages: list[Message] = []
        self.history: list[Message] = []  # the same, as a template is given it
        self.token_ids = TokenContext()  # the context: all segments from the last prompt on
        self.behind = 0  # tokens behind the prompts
        self.renderer = context.renderer
        self.tools: Sequence[JsonSchema] = ()  # as the model was last told
        self.step_rewards: list[float] = []
        self.rewards: Mapping[str, float | None] = {}
        self.info: dict[str, Any] = {}
        self.stop = Stop.FAULT
        self.fault: Fault | None = None
        self.stage = "reset"
        self.timings: dict[str, float] = defaultdict(float)
        self.track, self.clock = Track(context.lanes), context.lanes.clock
        self.started = self.since = self.clock()
        self.turn = self.most_turns = 0
        self.shared_turns = 0  # turns there had been when it branched
        self.forks: list[Episode] = []
        self.sub_agents: SubAgents | None = None  # once there is one
        self.folded = FoldedContexts(context.folding) if context.folding is not None else None

    @overload
    async def run(self) -> Trajectory: ...
    @overload
    async def run(self, until: Branching | None) -> Trajectory | None: ...
    async def run(self, until: Branching | None = None) -> Trajectory | None:
        """Play until the end and score, or until ``until.turn``; return the trajectory, or None if it branched.

        After it branched, ``forks`` holds the other branches. Failures of the infrastructure are in
        ``Trajectory.fault``, never raised.

        Raises:
            UserError: the environment or a tool broke its contract.
        """
        context, branched = self.context, False
        context.running.add(self)
        try:
            with anyio.move_on_after(context.limits.episode_timeout_s) as deadline:
                branched = await self._play(until)
            if deadline.cancelled_caught:
                limit = f"over {context.limits.episode_timeout_s:g} s, in {self._describe_method()}"
                own = None if 2 * self._own_seconds() > context.limits.episode_timeout_s else False
                self._end(Stop.TIMEOUT, Fault("episode_timeout", limit, own))
        except UserError:
            raise
        except InfraError as fault:
            self._end(Stop.FAULT, Fault(fault.kind, str(fault), self._find_provenance(fault.provoked)))
        except BaseException as error:  # the other of the two boundaries: around an episode
            if self.stage not in _METHODS or not is_failure(error):
                raise  # the engine and the renderer are ours, and Ctrl-C is the user's
            message = f"{self._describe_method()}: {traceback.format_exc(limit=-4)}"
            self._end(Stop.FAULT, Fault(f"env_{_METHODS[self.stage]}", message, self._find_provenance()))
        finally:
            if not branched:
                context.running.discard(self)
                await self.close()
        if branched:
            return None
        if self.fault is not None and self.fault.provoked is None and context.spec.has_health_check:
            self.fault = replace(self.fault, provoked=await context.probe.passes(context.spec.check_health))
        context.ended.add(self.fault)
        context.lanes.ended(self.track)
        return self.trajectory()

    def _find_provenance(self, provoked: bool | None = None) -> bool | None:
        """Return False for a fault that the model cannot have brought about; None where only evidence can tell."""
        return provoked if self._has_acted() and self.stage in _ANSWERING else False

    def _has_acted(self) -> bool:
        """Return True once the model has taken a turn."""
        return any(s.author == "model" for s in self.segments)

    def _own_seconds(self) -> float:
        """Return the seconds that the environment took to answer the model."""
        return sum(self.timings.get(stage, 0.0) for stage in _ANSWERING)

    async def _play(self, until: Branching | None) -> bool:
        """Play until the end and score, or until ``until.turn``. Return True if it stopped to branch."""
        env = self.env or await self._reset()
        self.most_turns = self.context.limits.max_turns or env.max_turns
        while self.turn < self.most_turns:
            if until is not None and self.turn == until.turn:
                with self._stage("clone"):
                    for number in range(1, until.branches):
                        self.forks.append(self._fork(env, number))
                self.shared_turns = self.turn
                return True
            engine_s, started = self.timings["generate"], self.clock()
            continues = await self._turn(env)
            engine_s = self.timings["generate"] - engine_s
            self.turn += 1
            self.context.record_turn(engine_s, self.clock() - started - engine_s)
            if not continues:
                break
        else:
            self.stop = Stop.MAX_TURNS
        with self._stage("score"):
            rewards = await self._bounded(env.score(self.trajectory()))
            self.rewards = validate_rewards(rewards, env)
        return False

    async def _reset(self) -> Env:
        context = self.context
        with self._stage("reset"):
            self.env = env = context.spec.make()
            env._track = self.track
            options = {"split": context.split, **context.options, **self.options}
            result = await self._bounded(env.reset(seed=self.task, options=options))
            observation, self.info = validate_reset(result, env)
            check_attributes(env)
            if env.template_words:
                self.renderer = context.renderer.with_words(env.template_words)
            tools = [t.schema for t in env.tool_list]
        context.offered_tools.add(tools)
        self._observe(observation, tools)
        if len(self.token_ids) >= context.engine.max_context:
            raise InfraError(
                "prompt_too_long",
                f"the prompt of {describe_task(self.task, context.split)} has {len(self.token_ids)} tokens, of "
                f"{context.engine.max_context} that the engine can hold",
            )
        if self.folded is not None:
            self.folded.begin(self)
        return env

    def _fork(self, env: Env, number: int) -> Episode:
        """Copy the episode as it stands after this turn, with a seed of its own."""
        fork = Episode(self.context, self.task, mix_seeds(self.seed, number), self.options)
        fork.env = env.clone()
        if not isinstance(fork.env, Env) or fork.env is env:
            raise ContractError(f"{type(env).__name__}.clone() must return another Env; it returned {fork.env!r:.80}")
        thread_methods(fork.env).shared = env.shared
        fork.env._track = fork.track = self.track.fork()
        fork.renderer = self.renderer
        if isinstance(fork.env, ToolEnv) and isinstance(env, ToolEnv):
            fork.env.fork_tools(env)
        fork.segments, fork.messages, fork.tools = list(self.segments), list(self.messages), self.tools
        fork.history, fork.token_ids, fork.behind = list(self.history), self.token_ids.copy(), self.behind
        fork.step_rewards, fork.info, fork.turn = list(self.step_rewards), dict(self.info), self.turn
        fork.timings.update(self.timings)
        fork.started, fork.shared_turns = self.started, self.turn
        return fork

    async def _turn(self, env: Env) -> bool:
        """Play one turn of the model and the environment's answer. Return True if the episode continues."""
        reply = await self._generate()
        if reply is None:
            self.stop = Stop.MAX_TOKENS
            return False
        step = await self._act(env, reply)
        tools = [t.schema for t in env.tool_list]
        self.step_rewards.append(float(step.reward))
        self.info |= step.info
        if step.terminated or step.truncated:
            self.stop = Stop.TERMINATED if step.terminated else Stop.TRUNCATED
            self.messages.extend(as_messages(step.observation))
            return False
        if self.folded is None:
            self._observe(step.observation, tools)
        elif not await self.folded.observe(self, step.observation, tools):
            self.stop = Stop.MAX_TOKENS
            return False
        return True

    async def _act(self, env: Env, reply: Reply) -> Step:
        """Return the environment's answer to a turn."""
        with self._stage("tools"):
            if isinstance(env, ToolEnv) and (spawns := list_spawns(env, reply)):
                self.sub_agents = self.sub_agents or SubAgents.begin(self)
                return await self.sub_agents.act(env, reply, spawns)
            if isinstance(env, ToolEnv) and self.sub_agents is not None:
                env._turn = self.sub_agents.main[-1]
            return validate_step(await self._bounded(env.step(reply)), env)

    async def _generate(self) -> Reply | None:
        """Sample the model's turn and read it. Return None if the turn, or the context, ran out of tokens."""
        sampled = await self._sample_turn(self.context.limits.max_tokens)
        if sampled is None:
            return None
        return None if sampled[1].stop_reason == "length" else sampled[0]

    async def _sample_turn(self, max_tokens: int, fold: int = 0) -> tuple[Reply, Completion] | None:
        """Sample a turn of the model, or a summary for the context's fold of that number. None: no room is left."""
        context, sampling = self.context, self.context.sampling
        with self._stage("generate"):
            token_ids = self.token_ids.copy()
            room = min(max_tokens, context.engine.max_context - len(token_ids))
            if context.limits.max_episode_tokens is not None:
                others = self.sub_agents.forest.count_behind() if self.sub_agents is not None else 0
                room = min(room, context.limits.max_episode_tokens - self.behind - others)
            if room <= 0:
                return None
            params = replace(
                sampling,
                max_tokens=room,
                stop_token_ids=tuple(self.renderer.get_stop_token_ids()),
                seed=mix_seeds(self.seed, self.turn, sampling.seed, *([fold] if fold else [])),
            )
            if fold:
                params = replace(params, grammar=None)  # a turn's, which a summary need not match
            params = ask_for_experts(params, self.segments)
            completion = await context.engine.generate(token_ids, params, session=self.session)
            if params.stop is not None:
                completion = params.stop.cut_completion(completion)
            context.tokens += len(completion.token_ids)
            if self.sub_agents is not None:
                self.sub_agents.count_turn()
            self._append(completion.segment())
            stop = params.stop.strings if params.stop is not None else ()
            reply = self.renderer.parse_response(
                completion.token_ids, prompt_ids=token_ids, tools=self.tools, stop=stop
            )
            self.messages.append(reply.message())
            self.history.append(write_turn(self.renderer, reply, completion.token_ids))
        return reply, completion

    def mark_context(self) -> tuple[int, int, int, int, TokenContext]:
        """Return a mark of what was said so far, for `return_to`."""
        sizes = len(self.segments), len(self.messages), len(self.history), self.behind
        return *sizes, self.token_ids.copy()

    def return_to(self, mark: tuple[int, int, int, int, TokenContext]) -> None:
        """Take back what was said behind a mark."""
        segments, messages, history, self.behind, self.token_ids = mark
        del self.segments[segments:], self.messages[messages:], self.history[history:]

    def begin_context(self, messages: Sequence[Message]) -> None:
        """Begin a context with messages as its prompt."""
        self.history = list(messages)
        with self._stage("render"):
            self._append(Segment("prompt", tuple(self.renderer.render_ids(messages, tools=self.tools))))

    def _observe(self, observation: Observation, tools: Sequence[JsonSchema]) -> None:
        """Append an observation: the prompt at first, later a segment that extends the context, or another prompt."""
        messages, history = as_messages(observation), list(self.history)
        self.messages.extend(messages)
        self.history.extend(messages)
        self.tools, renderer = tools, self.renderer
        with self._stage("render"):
            if not self.segments:
                self._append(Segment("prompt", tuple(renderer.render_ids(messages, tools=tools))))
                return
            completion = self.segments[-1].token_ids
            prompt = self.token_ids.take(len(self.token_ids) - len(completion))
            if isinstance(renderer, HistoryRewriter):
                anew = renderer.rewrite_history(prompt, completion, history, messages, tools=tools)
                if anew is not None:
                    self._append(Segment("prompt", tuple(anew.history)))
                    if anew.observation:
                        self._append(Segment("env", tuple(anew.observation)))
                    return
            self._append(Segment("env", tuple(render_behind(renderer, prompt, completion, messages, tools))))

    def _append(self, segment: Segment) -> None:
        """Append a segment; a prompt begins a context."""
        if segment.author == "prompt":
            self.token_ids = TokenContext()
        else:
            self.behind += len(segment.token_ids)
        self.segments.append(segment)
        self.token_ids.extend(segment.token_ids)

    async def _bounded(self, call: Awaitable[T]) -> T:
        """Await an environment's method under the turn's deadline."""
        if not hasattr(call, "__await__"):
            raise ContractError(
                f"{self._method()} must be `async def`; it returned {call!r:.80} (plain methods run in a thread where "
                "the class says `sync = True`)"
            )
        limit = self.context.limits.turn_timeout_s
        with anyio.move_on_after(limit) as scope:
            try:
                return await call
            except TimeoutError:
                if not scope.cancel_called:
                    raise self._method_fault("raised TimeoutError") from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise self._method_fault("raised CancelledError") from None
        left = "; its thread is left behind" if self.env is not None and self.env.is_left_behind else ""
        raise InfraError("turn_timeout", f"{self._describe_method()} took over {limit:g} s{left}")

    def _stage(self, name: str) -> _Stage:
        return _Stage(self, name)

    def _method(self) -> str:
        return f"{self.context.spec.cls.__name__}.{_METHODS[self.stage]}" if self.stage in _METHODS else self.stage

    def _describe_method(self) -> str:
        return f"{self._method()} of {describe_task(self.task, self.context.split)}"

    def _method_fault(self, message: str) -> InfraError:
        return InfraError(f"env_{_METHODS[self.stage]}", f"{self._describe_method()} {message}")

    def describe_wait(self) -> str:
        """Name what the episode waits for, in the words of a report: a tool, the engine, a method."""
        calls = self.env.running_calls if self.env is not None else {}
        if self.stage == "tools" and calls:
            names = sorted(set(calls.values()))
            return f"tool{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
        return "the engine" if self.stage == "generate" else self._method()

    def _end(self, stop: Stop, fault: Fault) -> None:
        self.stop, self.fault = stop, fault

    async def close(self) -> None:
        """Close the environment and end the engine's session, also on cancellation."""
        for fork in self.forks:  # that never ran
            await fork.close()
        self.context.engine.end_session(self.session)
        if self.sub_agents is not None:
            self.sub_agents.close()
        if self.env is None:
            return
        self.stage = "close"
        self.track.enter("close", self.clock())
        with anyio.CancelScope(shield=True):
            try:
                try:
                    await self._bounded(self.env.close())
                finally:
                    await self._bounded(self.env.close_tools())
            except UserError:
                raise
            except BaseException as error:  # belongs to the boundary around an episode
                if not is_failure(error):
                    raise
                if self.fault is None:
                    message = f"{self._describe_method()}: {type(error).__name__}: {error}"
                    self._end(Stop.FAULT, Fault("env_close", message, self._find_provenance()))
            finally:
                self.track.leave(self.clock())

    def trajectory(self) -> Trajectory:
        """Return the episode so far."""
        if self.env is not None:
            check_attributes(self.env)
            check_records(self.env)
        calls = list(self.env.call_records) if self.env else []
        if self.folded is not None:
            places = self.folded.place_calls(calls)
            calls = [replace(call, turn=turn) for call, turn in zip(calls, places, strict=True)]
        threads = self.folded.describe(self) if self.folded is not None else ()
        segments, step_rewards = list(self.segments), list(self.step_rewards)
        if (agents := self.sub_agents) is not None:
            calls = [replace(c, turn=turn) for c, turn in zip(calls, agents.place_calls(calls), strict=True)]
            segments += agents.list_segments()
            step_rewards += [0.0] * (len(agents.main) - len(step_rewards)) + agents.list_rewards()
            threads = agents.describe()
        return Trajectory(
            task=self.task,
            segments=tuple(segments),
            messages=tuple(self.messages),
            stop=self.stop,
            rewards=dict(self.rewards),
            weights=dict(self.env.reward_weights) if self.env else {},
            step_rewards=tuple(step_rewards),
            timings={**self.timings, "total": self.clock() - self.started},
            calls=tuple(calls),
            threads=threads,
            fault=self.fault,
            info={**self.info, **self.env.extras} if self.env else dict(self.info),
            metrics=dict(self.env.metrics) if self.env else {},
            temperature=self.context.sampling.temperature,
            shared_turns=self.shared_turns,
        )


class _Stage:
    """A stage of an episode: counts the block's seconds. No generator, as there are several stages a turn."""

    __slots__ = ("episode", "name", "started")

    def __init__(self, episode: Episode, name: str) -> None:
        self.episode, self.name = episode, name

    def __enter__(self) -> None:
        episode = self.episode
        episode.stage = self.name
        episode.since = self.started = now = episode.clock()
        episode.track.enter(self.name, now)

    def __exit__(self, *_: object) -> None:
        now = self.episode.clock()
        self.episode.timings[self.name] += now - self.started
        self.episode.track.leave(now)


# The environment's methods, by stage.
_METHODS = {name: name for name in ("reset", "clone", "play", "score", "close")} | {"tools": "step"}
_ANSWERING = ("tools", "play", "score", "close")  # stages in which the environment has the model's turns before it
_count = iter(range(1 << 62))
