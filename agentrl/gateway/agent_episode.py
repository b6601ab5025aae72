"""An episode that somebody else's agent plays, through an endpoint: its requests are the turns of its threads."""

from __future__ import annotations

import asyncio
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.environments.agent_env import AgentEnv, check_task_files
from agentrl.environments.env import Env, ToolEnv
from agentrl.environments.task_sampler import describe_task
from agentrl.environments.validation import as_messages, validate_rewards, validate_step
from agentrl.errors import ContractError, InfraError, UserError, is_failure
from agentrl.rollout.episode import Branching, Episode, EpisodeContext
from agentrl.rollout.threads.forest import SampledTurn, ThreadForest, TurnRefused
from agentrl.runtime.threads import run_in_thread
from agentrl.types import JsonSchema, Observation, Reply, Stop, ToolCall, Trajectory

if TYPE_CHECKING:
    from agentrl.gateway.gateway import Gateway


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
        self.forest = ThreadForest(
            context, self.renderer, seed, self.session, answering=self._answer_request, other_tokens=lambda: self.behind
        )
        self.requests = Counter[str]()  # by their dialects
        self._refused: Stop | None = None  # why a request was refused that the episode does not end by
        self._turn_rewards: dict[int, float] = {}
        self._requests: set[asyncio.Task[Any]] = set()
        self._doing = Counter[str]()  # requests that are being answered, by their stages
        self._begun: dict[str, float] = {}  # when the first of them was, by the same
        self._has_ended = False  # the agent
        self._folder = ""  # that it worked in
        self._failure: tuple[BaseException, str] | None = None  # of ours, and at which stage
        self._playing = anyio.CancelScope()
        self._stepping = asyncio.Lock()

    async def _play(self, until: Branching | None) -> bool:
        env = await self._reset()
        task = self._build_task(env)
        ending = AgentEnding()
        forest = self.forest
        forest.renderer, forest.most_turns = self.renderer, self.context.limits.max_turns or env.max_turns
        forest.turn_ended = self.clock()
        self._switch("agent")
        try:
            with self._playing:
                ending = await self._run_agent(env, task)
        finally:
            closed, forest.over = forest.over, forest.over or Stop.TERMINATED
            self._switch("")
            self._has_ended = True
            await self._stop_requests()  # at a deadline nothing runs behind this
        self.stage = "agent"  # and not that of a request that was cancelled
        if self._failure is not None:
            error, self.stage = self._failure
            raise error
        self.gateway.record_ending(ending)
        if not forest.turns or ending.killed:
            before = "" if forest.turns else ", before it made a request"
            raise InfraError("agent", f"{ending.error or 'the agent ended'}{before}\n{ending.trace}".rstrip())
        if closed is not None:
            self.stop = closed
        elif ending.error:
            self.stop = self._refused or Stop.AGENT_ERROR
            self.info["agent_error"] = f"{ending.error}\n{ending.trace}".rstrip()
        else:
            self.stop = Stop.TERMINATED
        self.messages = self.forest.find_main().messages
        if isinstance(env, AgentEnv):
            env.work_folder = Path(ending.folder) if ending.folder else None
        if closed is None:
            await self._answer_last(env)
        with self._stage("score"):
            rewards = await self._bounded(env.score(self.trajectory()))
            self.rewards = validate_rewards(rewards, env)
        return False

    def _build_task(self, env: Env) -> AgentTask:
        url = f"{self.gateway.mcp_url}/{self.key}" if self.gateway.mcp_url else ""
        task = AgentTask(list(self.messages), list(self.tools), self.gateway.base_url, self.key, url)
        if not isinstance(env, AgentEnv):
            return task
        check_task_files(env)
        return replace(task, files=dict(env.files), variables=dict(env.variables))

    async def _run_agent(self, env: Env, task: AgentTask) -> AgentEnding:
        """Let the agent play: the environment's own, or that of the run."""
        if isinstance(env, AgentEnv) and env.brings_agent():
            return await self._play_itself(env, task)
        assert self.gateway.agent is not None
        ending = await self.gateway.agent.run(task)
        self._folder = ending.folder
        return ending

    async def _play_itself(self, env: AgentEnv, task: AgentTask) -> AgentEnding:
        """Let the environment play. What it raises ends the episode as what its other methods raise does."""
        name = f"{type(env).__name__}.play"
        try:
            call = env.play(task)
            if not hasattr(call, "__await__"):
                raise ContractError(f"{name} must be `async def`; it returned {call!r:.80}")
            ending = await call
        except UserError:
            raise
        except BaseException as error:  # belongs to the boundary around an episode
            if not is_failure(error):
                raise
            whose = describe_task(self.task, self.context.split)
            told = InfraError("env_play", f"{name} of {whose}: {traceback.format_exc(limit=-4)}")
            self._fail(error if isinstance(error, InfraError) else told, "play")
            return AgentEnding()
        if not isinstance(ending, AgentEnding):
            raise ContractError(f"{name} must return an AgentEnding (agentrl.agents.agent); it returned {ending!r:.80}")
        return ending

    async def _answer_last(self, env: Env) -> None:
        """Let the environment answer the turn by which the agent ended, where it calls nothing."""
        main = self.forest.find_main()
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

    async def _stop_requests(self) -> None:
        for request in self._requests:
            request.cancel()
        if self._requests:
            await asyncio.wait(self._requests)

    def _has_acted(self) -> bool:
        return self.forest.turns > 0  # `segments` are filled when it is collected

    def _own_seconds(self) -> float:
        own = super()._own_seconds()
        if self._doing["tools"]:  # a call that is being cancelled
            own += self.clock() - self._begun["tools"]
        return own

    def _fail(self, error: BaseException, stage: str) -> None:
        """End the episode by an error that is not the agent's: the engine's, the renderer's, the environment's."""
        if self._failure is None:
            self._failure = error, stage
            self._playing.cancel()

    def _answer_request(self) -> AbstractContextManager[None]:
        return self._answering("generate")

    @contextmanager
    def _answering(self, stage: str) -> Iterator[None]:
        """Hold a request's task and stage while it is answered; an error of ours ends the episode.

        Seconds in which several are answered count once.
        """
        request = asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        if not self._doing.total():
            self._switch(stage)
        if not self._doing[stage]:
            self._begun[stage] = self.clock()
        self._doing[stage] += 1
        try:
            yield
        except TurnRefused as refusal:
            self._refused = refusal.stop or self._refused
            raise
        except Exception as error:
            self._fail(error, stage)
            raise
        finally:
            self._requests.discard(request)
            self._doing[stage] -= 1
            if not self._doing[stage]:
                self.timings[stage] += self.clock() - self._begun[stage]
            if not self._doing.total():
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
        for branch in {t.branch for t in self.forest.threads} - {0}:
            self.context.engine.end_session(self.forest.name_session(branch))
        await super().close()
        if self._folder:
            await run_in_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonSchema], *, is_retry: bool | None = None
    ) -> SampledTurn:
        """Sample the turn that a request asks for, as `ThreadForest.complete` does."""
        return await self.forest.complete(messages, tools, is_retry=is_retry)

    # -- the environment's tools ---------------------------------------------------------------------------------------

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """Run a tool of the environment for the agent; return its answer.

        Raises:
            TurnRefused: the episode is over, or the environment has no tools.
        """
        env = self.env
        if self.forest.over is not None or env is None:
            raise TurnRefused("episode_over", "the episode is over")
        if not isinstance(env, ToolEnv):
            raise TurnRefused("invalid_request", f"env {self.context.spec.name!r} has no tools")
        wire, call, turn = self.forest.find_call(name, arguments)
        with self._answering("tools"):
            if type(env).step is ToolEnv.step:  # calls of a turn run together, as they do without an agent
                return await self._step(env, wire, call, turn)
            async with self._stepping:
                return await self._step(env, wire, call, turn)

    async def _step(self, env: ToolEnv, wire: str, call: ToolCall, turn: int) -> str:
        env._turn = turn
        step = validate_step(await self._bounded(env.step(Reply("", (call,)))), env)
        self._turn_rewards[turn] = self._turn_rewards.get(turn, 0.0) + float(step.reward)
        self.info |= step.info
        messages = as_messages(step.observation)
        if len(messages) == 1 and messages[0]["role"] == "tool":
            self.forest.answers[wire] = messages[0]
        if step.terminated or step.truncated:
            self.forest.over = Stop.TERMINATED if step.terminated else Stop.TRUNCATED
        return "\n".join(m["content"] for m in messages)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def trajectory(self) -> Trajectory:
        """Return the episode so far: its threads one behind the other, in the order in which they were opened."""
        played = self.forest.collect()
        self.segments, order = played.segments, played.order
        place, last = {number: index for index, number in enumerate(order)}, max(len(order) - 1, 0)
        self.step_rewards = [0.0] * len(order)
        for number, reward in self._turn_rewards.items() if order else ():
            self.step_rewards[place.get(number, last)] += reward
        made = super().trajectory()
        calls = tuple(replace(c, turn=place.get(c.turn, last)) for c in made.calls)
        metrics = {**made.metrics, "agent/threads": float(played.count), "agent/side_calls": float(played.side_calls)}
        metrics["agent/invalid_calls"] = float(self.forest.count_invalid_calls())
        return replace(made, calls=calls, metrics=metrics, threads=played.threads)
