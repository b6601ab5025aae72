"""A Gymnasium environment as one of ours: its observations told in words, a reply as its action."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentrl.aside import in_thread
from agentrl.env import Env
from agentrl.errors import ContractError, ToolError, UserError, nearest
from agentrl.tasks import task_index
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
        self.world: Any = None

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[bool]:
        """Whether it can render text; and whether it can be played at all."""
        from agentrl.gym import words

        pattern = cls(**settings)
        world = made(pattern.name, pattern.make)
        ansi = "ansi" in world.metadata.get("render_modes", ())
        world.close()
        label = pattern.name if isinstance(pattern.name, str) else pattern.name.__name__
        if not ansi and not words.tellable(world.observation_space):
            raise ContractError(
                f"gym:{label} observes {world.observation_space!s:.80}: neither text nor up to "
                f"{words.LARGEST} numbers; wrap it so that it is, or let it render 'ansi'"
            )
        words.check_action(world.action_space, label, pattern.actions)
        yield ansi

    async def _call(self, function: Callable[[], T]) -> T:
        return await in_thread(function) if self.threads else function()

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        from agentrl.gym import words

        own = 2 * task_index(seed) + ((options or {}).get("split", "train") == "test")  # no seed is in both splits
        make = {**self.make, "render_mode": "ansi"} if self.shared else self.make
        self.world = await self._call(lambda: made(self.name, make))
        found, _ = await self._call(lambda: self.world.reset(seed=own))
        told = f"{words.asked(self.world.action_space, self.actions)}\n\n{self._told(found)}"
        return f"{self.system_prompt}\n\n{told}".strip(), {}

    async def step(self, action: Reply) -> Step:
        from agentrl.gym import words

        try:
            chosen = words.meant(self.world.action_space, action.content, self.actions)
        except ToolError as refusal:
            return Step(f"error: {refusal}", 0.0, False, False, {})
        found, reward, terminated, truncated, _ = await self._call(lambda: self.world.step(chosen))
        return Step(self._told(found), float(reward), bool(terminated), bool(truncated), {})

    def _told(self, found: Any) -> str:
        from agentrl.gym import words

        space = self.world.observation_space
        told = f"observation: {words.told(space, found)}" if words.tellable(space) else ""
        return f"{told}\n{words.plain(self.world.render())}".strip() if self.shared else told

    def clone(self) -> Env:
        other = copy.copy(self)
        other.world = copy.deepcopy(self.world)
        return other

    async def close(self) -> None:
        if self.world is not None:
            await self._call(self.world.close)


def made(make: Make, settings: Mapping[str, Any]) -> Any:
    """The Gymnasium environment of an id, or what a function makes. Raises UserError where there is none."""
    import gymnasium

    if not isinstance(make, str):
        return make(**settings)
    try:
        return gymnasium.make(make, disable_env_checker=True, **settings)
    except gymnasium.error.UnregisteredEnv:
        raise UserError(f"gymnasium has no environment {make!r}{nearest(make, gymnasium.registry)}") from None
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UserError(f"gym:{make} with {dict(settings)} cannot be made: {error}") from None


def from_gymnasium(env: Make, **settings: Any) -> type[Env]:
    """An ``Env`` class of a Gymnasium environment, for ``train(env=...)``.

    Args:
        env: an id, or a function that makes one; it is given ``render_mode="ansi"`` where that is offered.
        settings: as ``Gym`` takes them (``make``, ``actions``, ``max_turns``, ...).
    """
    name = env if isinstance(env, str) else getattr(env, "__name__", "Gym")
    Gym(env, **settings)  # a wrong setting is told here

    class Made(Gym):
        def __init__(self) -> None:
            super().__init__(env, **settings)

    Made.__name__ = Made.__qualname__ = name
    return Made
