"""One of our environments as a Gymnasium one: sync, an event loop in a thread of its own; text in, messages out."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import gymnasium
from anyio.from_thread import start_blocking_portal
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from agentrl.environments.env import Env
from agentrl.environments.gymnasium.spaces import MessageSpace, TextSpace
from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import task_integer
from agentrl.environments.validation import as_messages, validate_reset, validate_rewards, validate_step
from agentrl.errors import ContractError, UserError
from agentrl.renderer.call_formats import hermes
from agentrl.settings import registry
from agentrl.types import Message, Segment, Stop, Trajectory

_ENTRY = "agentrl.environments.gymnasium.to_gymnasium:as_gymnasium"


class _AsGymnasium(gymnasium.Env[list[Message], str]):
    """See `as_gymnasium`."""

    metadata = {"render_modes": []}

    def __init__(self, spec: EnvSpec, split: str, max_turns: int | None) -> None:
        self.observation_space, self.action_space = MessageSpace(), TextSpace()
        self.split, self.max_turns, self.agent_spec = split, max_turns, spec
        kwargs = {"env": spec.name if spec.name in registry.list_registered("env") else spec.cls, **spec.settings}
        self.spec = GymnasiumSpec(_id(spec.name), entry_point=_ENTRY, kwargs={**kwargs, "split": split})
        self.env: Env | None = None  # of the episode that is being played
        with ExitStack() as held:
            self._portal = held.enter_context(start_blocking_portal(name="agentrl gymnasium"))
            held.enter_context(self._portal.wrap_async_context_manager(spec.open()))
            # Also where close() is forgotten, and before the process ends: the thread would be waited for in vain.
            self._let_go = weakref.finalize(self, held.pop_all().close)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin task ``seed``; without one, a task drawn by the generator that the last seed began."""
        super().reset(seed=seed)
        self._end()
        self.env = env = self.agent_spec.make()
        self.task = self._drawn() if seed is None else seed
        options = {"split": self.split, **(options or {})}
        observation, info = validate_reset(self._portal.call(lambda: env.reset(seed=self.task, options=options)), env)
        self.messages = as_messages(observation)
        self.step_rewards: list[float] = []
        info = {**info, "task": self.task, "tools": [t.schema for t in env.tool_list]}
        return copy.deepcopy(self.messages), copy.deepcopy(info)

    def _drawn(self) -> int:
        """Draw a task of the split. Raises UserError where it has none."""
        count = self.agent_spec.count(self.split)
        if count == 0:
            raise UserError(f"split {self.split!r} of env {self.agent_spec.name!r} has no tasks")
        index = int(self.np_random.integers(count or 10**8))
        return index if count else task_integer(self.split, index)

    def step(self, action: str) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """One turn. The score is part of the last one's reward, and by its parts in ``info["rewards"]``.

        Raises:
            InfraError: the infrastructure failed; the episode has no reward.
        """
        if (env := self.env) is None:
            raise gymnasium.error.ResetNeeded("the episode is over, or has not begun: call reset()")
        reply = hermes.parse(action)
        step = validate_step(self._portal.call(env.step, reply), env)
        messages = as_messages(step.observation)
        self.messages += [reply.message(), *messages]
        self.step_rewards.append(float(step.reward))
        terminated, reward, info = bool(step.terminated), float(step.reward), dict(step.info)
        late = len(self.step_rewards) >= (self.max_turns or env.max_turns)
        truncated = not terminated and (bool(step.truncated) or late)
        if terminated or truncated:
            info["rewards"], worth = self._scored(env, Stop.TERMINATED if terminated else Stop.TRUNCATED)
            reward += worth if type(env).score is not Env.score else 0.0  # that is the sum of the steps'
            self._end()
        return copy.deepcopy(messages), reward, terminated, truncated, copy.deepcopy(info)

    def _scored(self, env: Env, stop: Stop) -> tuple[Mapping[str, float | None], float]:
        turns = (Segment("prompt", ()), *(Segment("model", (), (), ()) for _ in self.step_rewards))
        played = Trajectory(
            task=self.task,
            segments=turns,
            messages=tuple(self.messages),
            stop=stop,
            weights=env.reward_weights,
            step_rewards=tuple(self.step_rewards),
            calls=tuple(env.call_records),
        )
        rewards = validate_rewards(self._portal.call(env.score, played), env)
        return rewards, replace(played, rewards=rewards).reward or 0.0

    def _end(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            self._portal.call(env.close)
            self._portal.call(env.close_tools)

    def close(self) -> None:
        """Close the episode's environment, what they share, and the thread; a second time does nothing."""
        try:
            self._end()
        finally:
            self._let_go()


def as_gymnasium(
    env: str | type[Env] | EnvSpec, *, split: str = "train", max_turns: int | None = None, **settings: Any
) -> _AsGymnasium:
    """Wrap an environment as a ``gymnasium.Env``: an action is a turn's text, an observation the messages since.

    Args:
        env: a registered name, ``module:Class``, an ``Env`` subclass, or an ``EnvSpec``.
        split: ``train`` or ``test``.
        max_turns: of an episode, which is truncated then; the environment's own by default.
        settings: the environment's.
    """
    if isinstance(env, EnvSpec) and settings:
        raise ContractError(f"an EnvSpec has its settings; {', '.join(settings)} cannot be given beside it")
    return _AsGymnasium(env if isinstance(env, EnvSpec) else EnvSpec(env, **settings), split, max_turns)


def register_gymnasium() -> list[str]:
    """Register each available environment with Gymnasium, and return the ids: ``agentrl/math-tools-v0``.

    Settings go to ``gymnasium.make``; for a family, its member is one: ``make("agentrl/gym-v0", name="Taxi-v3")``.
    """
    names = {_id(name): name for name in registry.list_registered("env")}
    for wanted, name in names.items():
        if wanted not in gymnasium.registry:
            gymnasium.register(wanted, entry_point=_ENTRY, kwargs={"env": name})
    return list(names)


def _id(name: str) -> str:
    return f"agentrl/{''.join(c if c.isalnum() or c in '-_.' else '.' for c in name)}-v0"
