"""textarena: the single-player games of the package of that name, a turn each reply."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentrl import ContractError, Env, Reply, Step
from agentrl.environments.task_sampler import task_index
from agentrl.errors import suggest
from agentrl.runtime.processes import call_in_process
from agentrl.types import Observation, strip_thoughts

T = TypeVar("T")


class TextArena(Env):
    """A game of TextArena for one player: ``--env textarena:GuessTheNumber-v0``. The reply is the move.

    Args:
        name: the game's id.
        system_prompt: put before the game's own rules, in the same message.
        max_turns: replies of an episode; a game that counts its turns ends by itself, one invalid move more.
    """

    named_by = "name"
    needs = {"textarena": "textarena"}

    def __init__(self, name: str, system_prompt: str = "", max_turns: int = 40) -> None:
        self.name, self.system_prompt, self.max_turns = name, system_prompt, max_turns

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[None]:
        """Check that the game exists, is for one player, and can be played here."""
        await call_in_process(check_game, settings["name"])
        yield

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        # In a process of its own: making a puzzle takes some games seconds, and all of them draw from the global rng.
        self.game, self.rng_state = await call_in_process(
            start_game, self.name, f"textarena/{self.name}/{task_index(seed)}/{split}"
        )
        return f"{self.system_prompt}\n\n{_told(self.game)}".strip(), {}

    async def step(self, action: Reply) -> Step:
        move = strip_thoughts(action.content).strip()
        move = move if "[" in move or "]" in move else f"[{move}]"
        over = self._play(lambda: bool(self.game.step(action=move)[0]))
        if not over:
            return Step(_told(self.game), 0.0, False, False, {})
        reward, reason = _outcome(*self.game.close())
        return Step(reason or _told(self.game), reward, True, False, {"reason": reason})

    def _play(self, move: Callable[[], T]) -> T:
        """Make a move with the game's own random state in the place of the global one; nothing is awaited meanwhile."""
        outside = random.getstate()
        random.setstate(self.rng_state)
        try:
            return move()
        finally:
            self.rng_state = random.getstate()
            random.setstate(outside)


def check_game(name: str) -> None:
    """Raise ContractError if there is no such game, or it cannot be played alone, or not here."""
    from textarena.envs.registration import ENV_REGISTRY

    games = [k for k in ENV_REGISTRY if not k.endswith(("-raw", "-train"))]
    if name not in games:
        raise ContractError(f"textarena has no game {name!r}{suggest(name, games)}")
    start_game(name, "check")


def start_game(name: str, seed: str) -> tuple[Any, Any]:
    """Return a game that waits for its first move, and its random state.

    Raises:
        ContractError: it is for more players, or lacks something: a key, a word list, a package.
    """
    import textarena
    from textarena.envs.registration import ENV_REGISTRY
    from textarena.state import SinglePlayerState

    random.seed(seed)
    first = random.randrange(2**31)
    try:
        bare = f"{name}-raw"  # the wrappers tell the whole game again each turn
        game = textarena.make(bare if bare in ENV_REGISTRY else name)
        game.reset(num_players=1, seed=first)
    except (AssertionError, ValueError) as error:
        if "player" in str(error).lower():
            raise ContractError(_for_more(name, str(error))) from None
        raise ContractError(f"textarena:{name} cannot be played here: {error}") from None
    except (LookupError, OSError, ImportError, SyntaxError) as error:  # a word list, a file, a package, a newer Python
        what = " ".join(str(error).replace("*", "").split())
        raise ContractError(f"textarena:{name} cannot be played here: {type(error).__name__}: {what:.200}") from None
    if not isinstance(game.state, SinglePlayerState):
        raise ContractError(_for_more(name, f"it begins with a {type(game.state).__name__}"))
    return game, random.getstate()


def _for_more(name: str, why: str) -> str:
    return f"textarena:{name} is for more than one player, and only games for one can be trained on ({why})"


def _told(game: Any) -> str:
    """Return the game's new messages, without the player's own moves, which are in the conversation already."""
    from textarena import ObservationType

    _, said = game.get_observation()
    kept = [text.strip() for _, text, kind in said if kind != ObservationType.PLAYER_ACTION and isinstance(text, str)]
    return "\n\n".join(text for text in kept if text) or "(the game says nothing)"


def _outcome(rewards: Mapping[int, Any] | None, info: Mapping[int, Mapping[str, Any]]) -> tuple[float, str]:
    """Return the player's reward, and the reason for the end of the game."""
    reward, reason = (rewards or {}).get(0, 0.0), str(info[0].get("reason") or "")
    if isinstance(reward, str):  # Countdown, Cryptarithm, Slitherlink, ThreeCardMonte give the two in the wrong order
        reward, reason = reason.removeprefix("Invalid Move: "), f"Invalid Move: {reward}"
    return float(reward), reason
