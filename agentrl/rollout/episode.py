"""An episode while it is played: generate -> environment -> generate ...

The context handed to the engine is exactly the concatenation of the segments so far; what the model sampled is never
encoded again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.contract import as_messages, checked_reset, checked_rewards, checked_step
from agentrl.env import Env, ToolEnv
from agentrl.errors import ContractError, UserError, WorldFault
from agentrl.lanes import Track
from agentrl.types import Fault, Message, Observation, Segment, Stop, Trajectory

if TYPE_CHECKING:
    from agentrl.rollout import Rollout


@dataclass(frozen=True)
class Limits:
    """How far an episode may go. Deadlines nest: a tool's < the environment's turn < the episode's."""

    max_turns: int | None = None  # None: the environment's own
    max_turn_tokens: int = 512
    turn_timeout_s: float = 120.0
    episode_timeout_s: float = 600.0


@dataclass(frozen=True)
class Branching:
    """Episodes that share their beginning: after ``turn`` turns one becomes ``branches``, by ``Env.clone``."""

    turn: int
    branches: int


class Episode:
    """One episode while it is played. ``stage`` and ``since`` say what it is at, and since when."""

    def __init__(self, rollout: Rollout, task: int, seed: int, options: Mapping[str, Any]) -> None:
        self.rollout, self.task, self.seed, self.options = rollout, task, seed, options
        self.session = f"{task}-{seed:x}-{next(_count)}"
        self.env: Env | None = None
        self.segments: list[Segment] = []
        self.messages: list[Message] = []
        self.step_rewards: list[float] = []
        self.rewards: Mapping[str, float | None] = {}
        self.info: dict[str, Any] = {}
        self.stop = Stop.FAULT
        self.fault: Fault | None = None
        self.stage = "reset"
        self.timings: dict[str, float] = defaultdict(float)
        self.track, self.clock = Track(rollout.lanes), rollout.lanes.clock
        self.started = self.since = self.clock()
        self.turn = 0
        self.forks: list[Episode] = []

    async def run(self, until: Branching | None = None) -> bool:
        """Play to the end and score, or to where it branches: then it is true, and ``forks`` are there too."""
        env = self.env or await self._reset()
        max_turns = self.rollout.limits.max_turns or env.max_turns
        while self.turn < max_turns:
            if until is not None and self.turn == until.turn:
                with self._stage("clone"):
                    for number in range(1, until.branches):
                        self.forks.append(self._fork(env, number))
                return True
            engine_s, begun = self.timings["generate"], self.clock()
            goes_on = await self._turn(env, self.turn)
            engine_s = self.timings["generate"] - engine_s
            self.rollout.admission.took(engine_s, self.clock() - begun - engine_s)
            self.turn, self.rollout.turns = self.turn + 1, self.rollout.turns + 1
            if not goes_on:
                break
        else:
            self.stop = Stop.MAX_TURNS
        with self._stage("score"):
            scored = await self._bounded(env.score(self.trajectory()))
            self.rewards = checked_rewards(scored, env)
        return False

    async def _reset(self) -> Env:
        rollout = self.rollout
        with self._stage("reset"):
            self.env = env = rollout.spec.make()
            env._track = self.track
            options = {"split": rollout.split, **rollout.options, **self.options}
            found = await self._bounded(env.reset(seed=self.task, options=options))
            observation, self.info = checked_reset(found, env)
            tools = [t.schema for t in env.tool_list]
        rollout.offered.add(tools)
        self._observe(observation, tools)
        if len(self.token_ids) >= rollout.engine.max_context:
            raise WorldFault(
                "prompt_too_long",
                f"the prompt of task {self.task} has {len(self.token_ids)} tokens, of {rollout.engine.max_context} "
                "that the engine can hold",
            )
        return env

    def _fork(self, env: Env, number: int) -> Episode:
        """An episode that has come as far as this one, and throws its own dice from here."""
        fork = Episode(self.rollout, self.task, mixed(self.seed, number), self.options)
        fork.env = env.clone()
        if not isinstance(fork.env, Env) or fork.env is env:
            raise ContractError(f"{type(env).__name__}.clone() must return another Env; it returned {fork.env!r:.80}")
        fork.env.shared = env.shared
        fork.env._track = fork.track = self.track.fork()
        if isinstance(fork.env, ToolEnv) and isinstance(env, ToolEnv):
            fork.env.part_from(env)
        fork.segments, fork.messages = list(self.segments), list(self.messages)
        fork.step_rewards, fork.info, fork.turn = list(self.step_rewards), dict(self.info), self.turn
        fork.timings.update(self.timings)
        return fork

    async def _turn(self, env: Env, turn: int) -> bool:
        """One turn of the model and the world's answer; whether the episode goes on."""
        rollout = self.rollout
        with self._stage("generate"):
            context = self.token_ids
            room = min(rollout.limits.max_turn_tokens, rollout.engine.max_context - len(context))
            if room <= 0:
                self.stop = Stop.MAX_TOKENS
                return False
            stops = tuple(rollout.renderer.get_stop_token_ids())
            params = replace(
                rollout.sampling,
                max_tokens=room,
                stop_token_ids=stops,
                seed=mixed(self.seed, turn, rollout.sampling.seed),
            )
            done = await rollout.engine.generate(context, params, session=self.session)
            rollout.tokens += len(done.token_ids)
            self.segments.append(Segment("model", done.token_ids, done.logprobs, done.versions))
            reply = rollout.renderer.parse_response(done.token_ids, prompt_ids=context)
            self.messages.append(reply.message())
        if done.stop_reason == "length":
            self.stop = Stop.MAX_TOKENS
            return False
        with self._stage("tools"):
            step = checked_step(await self._bounded(env.step(reply)), env)
            tools = [t.schema for t in env.tool_list]
        self.step_rewards.append(float(step.reward))
        self.info |= step.info
        if step.terminated or step.truncated:
            self.stop = Stop.TERMINATED if step.terminated else Stop.TRUNCATED
            self.messages.extend(as_messages(step.observation))
            return False
        self._observe(step.observation, tools)
        return True

    def _observe(self, observation: Observation, tools: Sequence[dict[str, Any]]) -> None:
        """Append what the world said: the prompt at first, later a segment that extends the context."""
        messages = as_messages(observation)
        self.messages.extend(messages)
        renderer = self.rollout.renderer
        with self._stage("render"):
            if not self.segments:
                self.segments.append(Segment("prompt", tuple(renderer.render_ids(messages, tools=tools))))
                return
            context, completion = self.token_ids, self.segments[-1].token_ids
            prompt = context[: len(context) - len(completion)]
            extended = renderer.bridge_to_next_turn(prompt, completion, messages, tools=tools)
            if extended[: len(context)] != context:
                raise ContractError("the renderer changed tokens that were already in the context")
            self.segments.append(Segment("world", tuple(extended[len(context) :])))

    async def _bounded(self, call: Any) -> Any:
        """Await an environment's method under the turn's deadline."""
        if not hasattr(call, "__await__"):
            raise ContractError(f"{self._method()} must be `async def`; it returned {call!r:.80}")
        limit = self.rollout.limits.turn_timeout_s
        with anyio.move_on_after(limit) as scope:
            try:
                return await call
            except TimeoutError:
                if not scope.cancel_called:
                    raise WorldFault(f"env_{METHODS[self.stage]}", f"{self.where()} raised TimeoutError") from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise WorldFault(f"env_{METHODS[self.stage]}", f"{self.where()} raised CancelledError") from None
            except SystemExit as error:
                raise WorldFault(f"env_{METHODS[self.stage]}", f"{self.where()} raised {error!r}") from None
        raise WorldFault("turn_timeout", f"{self.where()} took over {limit:g} s")

    @property
    def token_ids(self) -> list[int]:
        return [t for s in self.segments for t in s.token_ids]

    def _stage(self, name: str) -> _Stage:
        return _Stage(self, name)

    def _method(self) -> str:
        return f"{self.rollout.spec.cls.__name__}.{METHODS[self.stage]}" if self.stage in METHODS else self.stage

    def waits_on(self) -> str:
        """In the words of a report."""
        calls = self.env.running_calls if self.env is not None else {}
        if self.stage == "tools" and calls:
            names = sorted(set(calls.values()))
            return f"tool{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
        return "the engine" if self.stage == "generate" else self._method()

    def where(self) -> str:
        return f"{self._method()} of task {self.task}"

    def end(self, stop: Stop, fault: Fault) -> None:
        self.stop, self.fault = stop, fault

    async def close(self) -> None:
        """Also on cancellation: the environment is closed, and the engine told."""
        for fork in self.forks:  # that were never played
            await fork.close()
        self.rollout.engine.end_session(self.session)
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
            except Exception as error:  # belongs to the boundary around an episode
                if self.fault is None:
                    self.end(Stop.FAULT, Fault("env_close", f"{self.where()}: {type(error).__name__}: {error}"))
            finally:
                self.track.leave(self.clock())

    def trajectory(self) -> Trajectory:
        return Trajectory(
            task=self.task,
            segments=tuple(self.segments),
            messages=tuple(self.messages),
            stop=self.stop,
            rewards=dict(self.rewards),
            weights=dict(self.env.reward_weights) if self.env else {},
            step_rewards=tuple(self.step_rewards),
            timings={**self.timings, "total": self.clock() - self.started},
            calls=tuple(self.env.call_records) if self.env else (),
            fault=self.fault,
            info={**self.info, **self.env.extras} if self.env else dict(self.info),
            metrics=dict(self.env.metrics) if self.env else {},
            temperature=self.rollout.sampling.temperature,
        )


class _Stage:
    """Inside, an episode is at that, and the seconds count. No generator: there are several a turn."""

    __slots__ = ("begun", "episode", "name")

    def __init__(self, episode: Episode, name: str) -> None:
        self.episode, self.name = episode, name

    def __enter__(self) -> None:
        episode = self.episode
        episode.stage = self.name
        episode.since = self.begun = now = episode.clock()
        episode.track.enter(self.name, now)

    def __exit__(self, *_: object) -> None:
        now = self.episode.clock()
        self.episode.timings[self.name] += now - self.begun
        self.episode.track.leave(now)


# The environment's methods, by stage.
METHODS = {name: name for name in ("reset", "clone", "score", "close")} | {"tools": "step"}
_count = iter(range(1 << 62))


def mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
