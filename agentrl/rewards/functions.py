"""Rewards in TRL's form, by name, with their settings; and how they are called."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from agentrl import registry
from agentrl.aside import in_thread, together
from agentrl.errors import ContractError, UserError, nearest
from agentrl.reward_log import RewardLog
from agentrl.reward_model import RewardModel
from agentrl.signature import settings_of
from agentrl.trainer_state import trainer_state

Reward = Callable[..., Any]
F = TypeVar("F", bound=Reward)


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
        name = _name_of(function)
        if name in found:
            raise ContractError(
                f"two rewards are called {name!r}: {_place_of(found[name])} and {_place_of(function)}; metrics and "
                "weights go by the name, so give one another: FUNCTION.__name__ = 'NAME'"
            )
        found[name] = function
    if not found:
        raise UserError("env.rewards is empty; name at least one, such as accuracy")
    for name in given:
        raise ContractError(f"env.reward_settings.{name}: no reward {name!r} is used{nearest(name, found)}")
    return found


def per_episode(function: F) -> F:
    """Mark a reward function that looks at each completion by itself, so that it need not wait for the group.

    It is called as soon as an episode has ended, with lists of one. Others are called once a group.
    """
    function.per_episode = True  # type: ignore[attr-defined]
    return function


def is_per_episode(function: Reward) -> bool:
    """Return True if the function is marked by `per_episode`, or is a ``partial`` of one that is."""
    inner = function.func if isinstance(function, partial) else function
    return bool(getattr(inner, "per_episode", False))


async def call_rewards(
    functions: Mapping[str, Reward], columns: Mapping[str, Sequence[Any]], log: RewardLog
) -> list[dict[str, float | None]]:
    """Call each function once, all at the same time; return the named rewards of each completion.

    Args:
        columns: ``completions`` and others, ``log.size`` values each.

    Raises:
        ContractError: a function does not take the columns, or returns no list of a number or None for each.
    """
    values: dict[str, Sequence[float | None]] = {}

    async def one(name: str, function: Reward) -> None:
        values[name] = await _called(name, function, columns, log)

    if len(functions) == 1:
        await one(*next(iter(functions.items())))
    else:
        async with together() as calls:
            for name, function in functions.items():
                calls.start_soon(one, name, function)
    return [{name: values[name][row] for name in functions} for row in range(log.size)]


async def _called(
    name: str, function: Reward, columns: Mapping[str, Sequence[Any]], log: RewardLog
) -> Sequence[float | None]:
    call = partial(function, **_arguments(name, function, columns, log))
    result = await call() if _is_async(function) else await in_thread(call)
    result = await result if inspect.isawaitable(result) else result
    result = result.tolist() if hasattr(result, "tolist") else result  # an array
    if not isinstance(result, list | tuple) or len(result) != log.size:
        many = "s" * (log.size != 1)
        raise ContractError(
            f"reward {name!r} returned {result!r:.80} for {log.size} completion{many}; it must return a list of "
            f"{log.size} number{many}"
        )
    for value in result:
        if value is not None and not _is_number(value):
            raise ContractError(f"reward {name!r} returned {value!r:.80}; a reward is a finite number, or None")
    return [None if value is None else float(value) for value in result]


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and abs(float(value)) < float("inf")
    except (TypeError, ValueError, OverflowError):
        return False


def _arguments(name: str, function: Reward, columns: Mapping[str, Any], log: RewardLog) -> dict[str, Any]:
    """Gather the columns, and of what TRL's trainer gives besides, all that the function takes."""
    offered = {"trainer_state": trainer_state(), "log_metric": log.log_metric, "log_extra": log.log_extra}
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return {**offered, **columns}
    kinds = {p.kind for p in signature.parameters.values()}
    wanted = offered.keys() if inspect.Parameter.VAR_KEYWORD in kinds else offered.keys() & signature.parameters.keys()
    arguments = {**{k: offered[k] for k in offered if k in wanted}, **columns}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ContractError(
            f"reward {name!r}: {error}; it is called with {', '.join(columns)} (take **columns too)"
        ) from None
    return arguments


def _name_of(function: Any) -> str:
    """Return its ``__name__``; for a ``partial`` without one that of the function in it."""
    own = getattr(function, "__name__", None)
    if own is None and isinstance(function, partial):
        return _name_of(function.func)
    return str(own or type(function).__name__)


def _place_of(function: Any) -> str:
    """Say where a person finds it: module, name and line."""
    if isinstance(function, partial):
        return f"a partial of {_place_of(function.func)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None)
    return f"{named.__module__}:{named.__qualname__}" + (f" (line {code.co_firstlineno})" if code else "")


def _is_async(function: Reward) -> bool:
    inner = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


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
    registry.check_needs(f"reward {reward!r}", found)
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
