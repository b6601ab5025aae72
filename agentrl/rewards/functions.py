"""Reward functions in TRL's form: resolved by name, with their settings, and called."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from agentrl.errors import ContractError, UserError, suggest
from agentrl.rewards.reward_log import RewardLog
from agentrl.rewards.reward_model import RewardModel
from agentrl.rewards.trainer_state import get_trainer_state
from agentrl.runtime.threads import contain_exits, open_task_group, run_in_thread
from agentrl.settings import registry
from agentrl.settings.signature import convert_settings
from agentrl.types import is_number

Reward = Callable[..., Any]
F = TypeVar("F", bound=Reward)


def resolve_rewards(
    rewards: Sequence[str | Reward] | Reward, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Reward]:
    """Resolve reward names and functions to functions by name.

    Args:
        settings: for those that take some, by name.

    Raises:
        UserError: there is none of that name; ContractError: it is no function, or has no such setting.
    """
    resolved: dict[str, Reward] = {}
    left = dict(settings or {})
    for reward in rewards if isinstance(rewards, Sequence) else [rewards]:
        own = left.pop(reward, {}) if isinstance(reward, str) else {}
        function = _resolve(reward, own)
        if not callable(function):
            raise ContractError(f"reward {reward!r} is {function!r:.60}, not a function")
        name = _name_of(function)
        if name in resolved:
            raise ContractError(
                f"two rewards are called {name!r}: {_describe_place(resolved[name])} and {_describe_place(function)}; "
                "metrics and weights go by the name, so give one another: FUNCTION.__name__ = 'NAME'"
            )
        resolved[name] = function
    if not resolved:
        raise UserError("env.rewards is empty; name at least one, such as accuracy")
    for name in left:
        raise ContractError(f"env.reward_settings.{name}: no reward {name!r} is used{suggest(name, resolved)}")
    return resolved


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
        values[name] = await contain_exits(_call_reward(name, function, columns, log))

    if len(functions) == 1:
        await one(*next(iter(functions.items())))
    else:
        async with open_task_group() as calls:
            for name, function in functions.items():
                calls.start_soon(one, name, function)
    return [{name: values[name][row] for name in functions} for row in range(log.size)]


async def _call_reward(
    name: str, function: Reward, columns: Mapping[str, Sequence[Any]], log: RewardLog
) -> Sequence[float | None]:
    call = partial(function, **_arguments(name, function, columns, log))
    result = await call() if _is_async(function) else await run_in_thread(call)
    result = await result if inspect.isawaitable(result) else result
    result = result.tolist() if hasattr(result, "tolist") else result  # an array
    if not isinstance(result, list | tuple) or len(result) != log.size:
        many = "s" * (log.size != 1)
        raise ContractError(
            f"reward {name!r} returned {result!r:.80} for {log.size} completion{many}; it must return a list of "
            f"{log.size} number{many}"
        )
    for value in result:
        if value is not None and not is_number(value):
            raise ContractError(f"reward {name!r} returned {value!r:.80}; a reward is a finite number, or None")
    return [None if value is None else float(value) for value in result]


def _arguments(name: str, function: Reward, columns: Mapping[str, Any], log: RewardLog) -> dict[str, Any]:
    """Gather the columns, and those of TRL's further arguments that the function takes."""
    offered = {
        "trainer_state": get_trainer_state(),
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
        "set_weight": partial(log.set_weight, name),
    }
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return {**offered, **columns}
    kinds = {p.kind for p in signature.parameters.values()}
    taken = offered.keys() if inspect.Parameter.VAR_KEYWORD in kinds else offered.keys() & signature.parameters.keys()
    arguments = {**{k: offered[k] for k in offered if k in taken}, **columns}
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


def _describe_place(function: Any) -> str:
    """Describe the place of a function: module, name and line."""
    if isinstance(function, partial):
        return f"a partial of {_describe_place(function.func)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None)
    return f"{named.__module__}:{named.__qualname__}" + (f" (line {code.co_firstlineno})" if code else "")


def _is_async(function: Reward) -> bool:
    inner = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _resolve(reward: Any, settings: Mapping[str, Any]) -> Any:
    if hasattr(reward, "config") and hasattr(reward, "get_input_embeddings"):
        return _reward_model(reward)
    if not isinstance(reward, str):
        return reward
    kind, _, name = reward.partition(":")
    if kind == "reward-model":
        return _reward_model(name)
    known = registry.list_registered("reward")
    if not name and reward not in known:
        raise UserError(f"no reward {reward!r}{suggest(reward, known)} (or say module:function, reward-model:NAME)")
    loaded = registry.load_registered("reward", reward)
    registry.check_needs(f"reward {reward!r}", loaded)
    if isinstance(loaded, type):
        return _make_reward(reward, loaded, json.dumps(dict(settings), sort_keys=True))
    if settings:
        raise ContractError(f"env.reward_settings.{reward}: it has no settings")
    return loaded


@lru_cache(maxsize=64)  # one for all episodes of a run: they are made anew each, with the same settings
def _make_reward(name: str, cls: Any, settings: str) -> Any:
    return cls(**convert_settings(cls, json.loads(settings), f"reward {name!r}", f"env.reward_settings.{name}"))


@lru_cache(maxsize=8)
def _reward_model(model: Any) -> RewardModel:
    return RewardModel(model)
