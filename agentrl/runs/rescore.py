"""New scores for stored episodes: by the environment as it is now, or by other reward functions. No model is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from agentrl.environments.agent_env import AgentEnv
from agentrl.environments.env import Env
from agentrl.environments.spec import EnvSpec
from agentrl.environments.validation import validate_reset, validate_rewards, validate_step
from agentrl.errors import InfraError, UserError
from agentrl.rewards.functions import Reward, call_rewards, is_per_episode
from agentrl.rewards.reward_log import RewardLog
from agentrl.rewards.trainer_state import HISTORY, TrainerState, replay_trainer_state
from agentrl.rollout.group_scoring import score_group
from agentrl.rollout.sub_agents import list_spawns
from agentrl.runs.folder import read_lines
from agentrl.runs.reader import EpisodeId
from agentrl.runtime.threads import open_task_group
from agentrl.settings.schema import TrainConfig
from agentrl.types import Fault, Message, Reply, ThreadRole, ToolCall, Trajectory

_CONCURRENCY = 32
Rewards = Mapping[str, float | None]


@dataclass(frozen=True)
class RescoredEpisode:
    """An episode with its old and new rewards; ``None`` and the reason if it could not be scored."""

    where: EpisodeId
    before: Trajectory
    rewards: Rewards | None
    reward: float | None
    why: str = ""


async def rescore_episodes(
    spec: EnvSpec,
    groups: Iterable[Sequence[tuple[EpisodeId, Trajectory]]],
    functions: Mapping[str, Reward] | None = None,
    *,
    act: bool = False,
    timeout_s: float = 120.0,
    state_at: Callable[[EpisodeId], TrainerState] = lambda where: TrainerState(),
) -> AsyncIterator[RescoredEpisode]:
    """Score each episode that ended without a fault again.

    Args:
        spec: open.
        groups: the episodes, in groups whose members are compared with each other.
        functions: instead of the environment's ``score``. The episode's task is reset all the same, and each key of
            its ``info`` is a column.
        state_at: the state of the training when an episode was scored, for rewards that read it.
        act: give the replies to the environment again, tools and all, for one whose score depends on its state.

    Raises:
        UserError: the environment scores what its agent did, which is gone.
    """
    if functions is None and issubclass(spec.cls, AgentEnv):
        raise UserError(
            f"env {spec.name!r} scores what an agent left, in its folder or elsewhere, and that is gone with the "
            "episode: give functions of what was said, --rewards NAME,NAME"
        )
    valid = ([(where, t) for where, t in group if t.fault is None] for group in groups)
    left = iter([group for group in valid if group])
    scoring = _Scoring(spec, functions, act, timeout_s)
    send, receive = anyio.create_memory_object_stream[RescoredEpisode](_CONCURRENCY)

    async def work() -> None:
        for group in left:
            with replay_trainer_state(state_at(group[0][0])):
                scored = await scoring.score(group)
            for episode in scored:
                await send.send(episode)

    async def score_all() -> None:
        async with send, open_task_group() as workers:
            for _ in range(_CONCURRENCY):
                workers.start_soon(work)

    async with open_task_group() as tasks:
        tasks.start_soon(score_all)
        async with receive:
            async for episode in receive:
                yield episode


def read_states(run: Path, config: TrainConfig) -> Callable[[EpisodeId], TrainerState]:
    """Return the function from an episode of a run to the state of the training that its rewards were given.

    That is the state before its step, or, of an evaluation, after it; what was rolled out ahead of the learner may have
    seen an earlier one.
    """
    file = run / "metrics.jsonl"  # an evaluation's folder has none, a run that goes on a last line that is half-written
    rows = [row for row in read_lines(file) if "step_time" in row]

    def state_at(where: EpisodeId) -> TrainerState:
        done = where.step - (where.split == "train")
        history = tuple(row for row in rows if row["step"] <= done)[-HISTORY:]
        return TrainerState(done, config.steps, 0.0, config.run.save_every, config.eval.every, log_history=history)

    return state_at


@dataclass(frozen=True)
class _Scoring:
    """The way to score the episodes of a run."""

    spec: EnvSpec
    functions: Mapping[str, Reward] | None
    act: bool
    timeout_s: float

    async def score(self, group: Sequence[tuple[EpisodeId, Trajectory]]) -> list[RescoredEpisode]:
        """Score each member by itself, then those that could be scored together."""
        members: list[tuple[Env | None, Trajectory]] = [(None, t) for _, t in group]

        async def score_member(number: int) -> None:
            members[number] = await self._score_episode(*group[number])

        async with open_task_group() as episodes:
            for number in range(len(group)):
                episodes.start_soon(score_member, number)
        if (env := next((e for e, t in members if e is not None and t.fault is None), None)) is not None:
            after = await self._score_group(env, [t for _, t in members], group[0][0].split)
        else:
            after = [t for _, t in members]
        return [_compare(where, before, t) for (where, before), t in zip(group, after, strict=True)]

    async def _score_episode(self, where: EpisodeId, before: Trajectory) -> tuple[Env | None, Trajectory]:
        """Score an episode; return its environment, closed, and the episode with new rewards, or its fault."""
        env = self.spec.make()
        bare = replace(before, rewards={}, metrics={}, weights=env.reward_weights if self.functions is None else {})
        try:
            with anyio.fail_after(self.timeout_s):
                result = await env.reset(seed=before.task, options={"split": where.split})
                _, info = validate_reset(result, env)
                if self.act:
                    await _act(env, before)
                if self.functions is not None:
                    own = {name: f for name, f in self.functions.items() if is_per_episode(f)}
                    return env, (await _score_by_functions(own, [replace(bare, info=info)], where.split))[0]
                rewards = validate_rewards(await env.score(before), env)
                return env, replace(bare, weights=dict(env.reward_weights)).with_rewards(rewards)
        except UserError:
            raise
        except Exception as error:  # around an episode
            kind = error.kind if isinstance(error, InfraError) else type(error).__name__
            return env, replace(bare, fault=Fault(kind, str(error)))
        finally:
            with anyio.CancelScope(shield=True):
                await env.close()
                await env.close_tools()

    async def _score_group(self, env: Env, members: Sequence[Trajectory], split: str) -> Sequence[Trajectory]:
        if self.functions is not None:
            env = _GroupFunctions({name: f for name, f in self.functions.items() if not is_per_episode(f)}, split)
        return await score_group(env, members, self.timeout_s) if env.scores_groups else members


class _GroupFunctions(Env):
    """An environment that scores a whole group by reward functions alone."""

    def __init__(self, functions: Mapping[str, Reward], split: str) -> None:
        self.functions, self.scores_groups, self.split = functions, bool(functions), split

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return await _score_by_functions(self.functions, trajectories, self.split)


async def _score_by_functions(
    functions: Mapping[str, Reward], trajectories: Sequence[Trajectory], split: str
) -> list[Trajectory]:
    if not functions:
        return list(trajectories)
    log = RewardLog(len(trajectories))
    rewards = await call_rewards(functions, _columns(trajectories), log)
    own_weights = log.weights if split == "train" else {}
    weighted = (replace(t, weights={**t.weights, **own_weights}) for t in trajectories)
    return [t.with_rewards(own) for t, own in zip(weighted, rewards, strict=True)]


def _compare(where: EpisodeId, before: Trajectory, after: Trajectory) -> RescoredEpisode:
    if after.fault is not None:
        return RescoredEpisode(where, before, None, None, f"{after.fault.kind}: {after.fault.message}")
    return RescoredEpisode(where, before, after.rewards, after.reward)


async def _act(env: Env, before: Trajectory) -> None:
    for reply in _list_replies(env, before):
        step = validate_step(await env.step(reply), env)
        if step.terminated or step.truncated:
            return


def _list_replies(env: Env, before: Trajectory) -> list[Reply]:
    """List the replies that the environment answered, in the order of time; of sub-agents those that have calls."""
    own = [_rebuild_reply(m) for m in before.messages if m["role"] == "assistant"]
    agents = [t for t in before.threads if t.role is ThreadRole.SUB_AGENT]
    main = next((t for t in before.threads if t.role is ThreadRole.MAIN), None)
    if not agents or main is None or len(own) != len(main.turns):
        return own
    by_turn = dict[int, Reply]()
    for turn, reply in zip(main.turns, own, strict=True):
        spawns = list_spawns(env, reply)
        others = tuple(c for c in reply.tool_calls if c not in spawns)
        if others or not spawns:
            by_turn[turn] = replace(reply, tool_calls=others)
    for thread in agents:
        replies = [_rebuild_reply(m) for m in thread.messages if m["role"] == "assistant"]
        by_turn |= {n: r for n, r in zip(thread.turns, replies[-len(thread.turns) :], strict=False) if r.tool_calls}
    return [by_turn[turn] for turn in sorted(by_turn)]


def _rebuild_reply(message: Message) -> Reply:
    """Rebuild the reply of a message; a call that could not be read has no arguments."""
    calls = [
        ToolCall(c.get("id", ""), c["function"]["name"], c["function"]["arguments"])
        for c in message.get("tool_calls") or ()
    ]
    return Reply(message["content"], tuple(calls))


def _columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    names = {name for t in trajectories for name in t.info}
    columns: dict[str, list[Any]] = {name: [t.info.get(name) for t in trajectories] for name in sorted(names)}
    split = [
        next((i for i, m in enumerate(t.messages) if m["role"] == "assistant"), len(t.messages)) for t in trajectories
    ]
    columns["prompts"] = [list(t.messages[:at]) for t, at in zip(trajectories, split, strict=True)]
    columns["completions"] = [list(t.messages[at:]) for t, at in zip(trajectories, split, strict=True)]
    columns["completion_ids"] = [
        [i for s in t.segments if s.author == "model" for i in s.token_ids] for t in trajectories
    ]
    return columns
