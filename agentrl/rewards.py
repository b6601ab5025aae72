"""Rewards in TRL's form, by name, with their settings; and how they are called."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from agentrl import registry
from agentrl.aside import in_thread
from agentrl.errors import ContractError, UserError, nearest
from agentrl.reward_model import RewardModel
from agentrl.signature import settings_of

Reward = Callable[..., Any]


def functions(
    rewards: Sequence[str | Reward], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Reward]:
    """The rewards by their names.

    Args:
        settings: for those that take some, by name.

    Raises:
        UserError: there is none of that name; ContractError: it is no function, or has no such setting.
    """
    found: dict[str, Reward] = {}
    given = dict(settings or {})
    for reward in rewards:
        own = given.pop(reward, {}) if isinstance(reward, str) else {}
        function = _function(reward, own)
        if not callable(function):
            raise ContractError(f"reward {reward!r} is {function!r:.60}, not a function")
        name = getattr(function, "__name__", type(function).__name__)
        if name in found:
            raise ContractError(f"two rewards are called {name!r}")
        found[name] = function
    if not found:
        raise UserError("env.rewards is empty; name at least one, such as accuracy")
    for name in given:
        raise ContractError(f"env.reward_settings.{name}: no reward {name!r} is used{nearest(name, found)}")
    return found


async def called(name: str, function: Reward, columns: Mapping[str, Any]) -> float | None:
    """What it says of one completion. Raises ContractError where that is no list of one number."""
    try:
        inspect.signature(function).bind(**columns)
    except TypeError as error:
        raise ContractError(
            f"reward {name!r}: {error}; it is called with {', '.join(columns)} (take **columns too)"
        ) from None
    call = partial(function, **columns)
    result = await call() if _is_async(function) else await in_thread(call)
    result = await result if inspect.isawaitable(result) else result
    result = result.tolist() if hasattr(result, "tolist") else result  # an array
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise ContractError(
            f"reward {name!r} returned {result!r:.80} for 1 completion; it must return a list of 1 number"
        )
    value: float | None = result[0]
    return value


def _is_async(function: Reward) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _function(reward: Any, settings: Mapping[str, Any]) -> Any:
    if hasattr(reward, "config") and hasattr(reward, "get_input_embeddings"):
        return _reward_model(reward)
    if not isinstance(reward, str):
        return reward
    kind, _, name = reward.partition(":")
    if kind == "reward-model":
        return _reward_model(name)
    known = registry.available("reward")
    if not name and reward not in known:
        raise UserError(f"no reward {reward!r}{nearest(reward, known)} (or say module:function, reward-model:NAME)")
    found = registry.load("reward", reward)
    if isinstance(found, type):
        return _made(reward, found, json.dumps(dict(settings), sort_keys=True))
    if settings:
        raise ContractError(f"env.reward_settings.{reward}: it has no settings")
    return found


@lru_cache(maxsize=64)  # one for all episodes of a run: they are made anew each, with the same settings
def _made(name: str, cls: Any, settings: str) -> Any:
    return cls(**settings_of(cls, json.loads(settings), f"reward {name!r}", f"env.reward_settings.{name}"))


@lru_cache(maxsize=8)
def _reward_model(model: Any) -> RewardModel:
    return RewardModel(model)
