"""textarena: the single-player games of the package of that name, a turn each reply."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from agentrl import ContractError, Env, Reply, Step
from agentrl.environments.task_sampler import task_index
from agentrl.errors import suggest
from agentrl.runtime.processes import call_in_process
from agentrl.types import Observation, strip_thoughts

_KEPT = 64  # games of a worker that wait for their next move


class Position(NamedTuple):
    """A moment of a game: its words, whether it is over, and then the player's reward, and why it ended."""

    text: str
    over: bool = False
    reward: float = 0.0
    reason: str = ""


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
        self.seed = ""
        self.moves: tuple[str, ...] = ()

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[None]:
        """Check that the game exists, is for one player, and can be played here."""
        await call_in_process(check_game, settings["name"])
        yield

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        self.seed, self.moves = f"textarena/{self.name}/{task_index(seed)}/{split}", ()
        return f"{self.system_prompt}\n\n{(await self._play()).text}".strip(), {}

    async def step(self, action: Reply) -> Step:
        move = strip_thoughts(action.content).strip()
        self.moves = (*self.moves, move if "[" in move or "]" in move else f"[{move}]")
        position = await self._play()
        if not position.over:
            return Step(position.text, 0.0, False, False, {})
        return Step(position.reason or position.text, position.reward, True, False, {"reason": position.reason})

    async def _play(self) -> Position:
        # In a process of its own: making a puzzle takes some games seconds, and all of them draw from the global rng.
        return Position(*await call_in_process(play_game, self.name, self.seed, self.moves))


def check_game(name: str) -> None:
    """Raise ContractError if there is no such game, or it cannot be played alone, or not here."""
    from textarena.envs.registration import ENV_REGISTRY

    games = [k for k in ENV_REGISTRY if not k.endswith(("-raw", "-train"))]
    if name not in games:
        raise ContractError(f"textarena has no game {name!r}{suggest(name, games)}")
    _start(name, "check")


_games: OrderedDict[tuple[str, str, tuple[str, ...]], tuple[Any, Any]] = OrderedDict()


def play_game(name: str, seed: str, moves: Sequence[str]) -> Position:
    """Play all moves of a game, and return where it stands. Of one that was played here the last move is enough.

    Raises:
        ContractError: it is for more players, or lacks something: a key, a word list, a package.
    """
    kept = _games.pop((name, seed, tuple(moves[:-1])), None) if moves else None
    game, states = kept or copy.deepcopy(_start(name, seed))
    left = moves[-1:] if kept else moves
    position = Position("" if kept else _read_messages(game))
    for move in left:
        _set_random_states(states)
        over = bool(game.step(action=move)[0])
        states = _get_random_states()
        position = _end(game) if over else Position(_read_messages(game))
    if not position.over:
        _games[name, seed, tuple(moves)] = game, states
    if len(_games) > _KEPT:
        _games.popitem(last=False)
    return position


def _end(game: Any) -> Position:
    reward, reason = _outcome(*game.close())
    return Position("" if reason else _read_messages(game), True, reward, reason)


def _get_random_states() -> tuple[Any, Any]:
    import numpy as np

    return random.getstate(), np.random.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    import numpy as np

    random.setstate(states[0])
    np.random.set_state(states[1])


@lru_cache(maxsize=16)  # the members of a group play the same
def _start(name: str, seed: str) -> tuple[Any, Any]:
    """Return a game that waits for its first move, and the random states.

    Raises:
        ContractError: it is for more players, or lacks something: a key, a word list, a package.
    """
    import numpy as np
    import textarena
    from textarena.envs.registration import ENV_REGISTRY
    from textarena.state import SinglePlayerState

    random.seed(seed)
    first = random.randrange(2**31)
    np.random.seed(first)
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
    return game, _get_random_states()


def _for_more(name: str, why: str) -> str:
    return f"textarena:{name} is for more than one player, and only games for one can be trained on ({why})"


def _read_messages(game: Any) -> str:
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
