"""A Gymnasium environment as one of ours: its observations in words, a reply as its action."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentrl.environments.env import Env
from agentrl.environments.task_sampler import task_index
from agentrl.errors import ContractError, ToolError, UserError, suggest
from agentrl.runtime.threads import run_in_thread
from agentrl.types import Observation, Reply, Step

T = TypeVar("T")
Make = str | Callable[..., Any]

_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}


class Gym(Env):
    """A Gymnasium environment: ``--env gym:FrozenLake-v1``. The model acts by replying.

    It observes text or some numbers, or can render ``ansi``; it takes Discrete, MultiDiscrete or Text. A reply that
    means no action is answered by how to act, and costs a turn.

    Args:
        name: the environment's id.
        make: what ``gymnasium.make`` takes beside: ``--env.make.is_slippery false``.
        actions: names of the actions, in order, for a Discrete space.
        max_turns: replies of an episode.
        system_prompt: put before the first observation, in the same message.
        threads: run it off the event loop, where ``step`` takes long.
    """

    named_by = "name"
    needs = {"gymnasium": "gym"}

    def __init__(
        self,
        name: Any,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        max_turns: int = 50,
        system_prompt: str = "",
        threads: bool = False,
    ) -> None:
        self.name, self.make, self.max_turns = name, dict(make or {}), max_turns
        self.system_prompt, self.threads = system_prompt, threads
        known = _NAMES.get(self.name.rpartition("-v")[0], ()) if isinstance(name, str) else ()
        self.actions = tuple(actions if actions is not None else known)
        self.gymnasium_env: Any = None

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[bool]:
        """Check that it can be played; yield True if it can render text."""
        from agentrl.environments.gymnasium import space_text

        pattern = cls(**settings)
        env = _make_gymnasium(pattern.name, pattern.make)
        ansi = "ansi" in env.metadata.get("render_modes", ())
        env.close()
        label = pattern.name if isinstance(pattern.name, str) else pattern.name.__name__
        if not ansi and not space_text.is_describable(env.observation_space):
            raise ContractError(
                f"gym:{label} observes {env.observation_space!s:.80}: neither text nor up to "
                f"{space_text.LARGEST} numbers; wrap it so that it is, or let it render 'ansi'"
            )
        space_text.check_action_space(env.action_space, label, pattern.actions)
        yield ansi

    async def _call(self, function: Callable[[], T]) -> T:
        return await run_in_thread(function) if self.threads else function()

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        from agentrl.environments.gymnasium import space_text

        own = 2 * task_index(seed) + ((options or {}).get("split", "train") == "test")  # no seed is in both splits
        make = {**self.make, "render_mode": "ansi"} if self.shared else self.make
        self.gymnasium_env = await self._call(lambda: _make_gymnasium(self.name, make))
        observation, _ = await self._call(lambda: self.gymnasium_env.reset(seed=own))
        rules = space_text.describe_actions(self.gymnasium_env.action_space, self.actions)
        return f"{self.system_prompt}\n\n{rules}\n\n{self._describe(observation)}".strip(), {}

    async def step(self, action: Reply) -> Step:
        from agentrl.environments.gymnasium import space_text

        try:
            move = space_text.parse_action(self.gymnasium_env.action_space, action.content, self.actions)
        except ToolError as refusal:
            return Step(f"error: {refusal}", 0.0, False, False, {})
        observation, reward, terminated, truncated, _ = await self._call(lambda: self.gymnasium_env.step(move))
        return Step(self._describe(observation), float(reward), bool(terminated), bool(truncated), {})

    def _describe(self, observation: Any) -> str:
        from agentrl.environments.gymnasium import space_text

        space, text = self.gymnasium_env.observation_space, ""
        if space_text.is_describable(space):
            text = f"observation: {space_text.describe_observation(space, observation)}"
        return f"{text}\n{space_text.strip_colours(self.gymnasium_env.render())}".strip() if self.shared else text

    def clone(self) -> Env:
        other = copy.copy(self)
        other.gymnasium_env = copy.deepcopy(self.gymnasium_env)
        return other

    async def close(self) -> None:
        if self.gymnasium_env is not None:
            await self._call(self.gymnasium_env.close)


def _make_gymnasium(make: Make, settings: Mapping[str, Any]) -> Any:
    """Make the Gymnasium environment of an id, or call a function that makes one. Raises UserError if there is none."""
    import gymnasium

    if not isinstance(make, str):
        return make(**settings)
    try:
        return gymnasium.make(make, disable_env_checker=True, **settings)
    except gymnasium.error.UnregisteredEnv:
        raise UserError(f"gymnasium has no environment {make!r}{suggest(make, gymnasium.registry)}") from None
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UserError(f"gym:{make} with {dict(settings)} cannot be made: {error}") from None


def from_gymnasium(env: Make, **settings: Any) -> type[Env]:
    """Make an ``Env`` class of a Gymnasium environment, for ``train(env=...)``.

    Args:
        env: an id, or a function that makes one; it is given ``render_mode="ansi"`` where that is offered.
        settings: as ``Gym`` takes them (``make``, ``actions``, ``max_turns``, ...).
    """
    name = env if isinstance(env, str) else getattr(env, "__name__", "Gym")
    Gym(env, **settings)  # reports a wrong setting now

    class Made(Gym):
        def __init__(self) -> None:
            super().__init__(env, **settings)

    Made.__name__ = Made.__qualname__ = name
    return Made
