"""Sync environments: plain ``def`` methods, which run in a thread of the episode's own."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar

from agentrl.environments.env import Env
from agentrl.errors import ContractError
from agentrl.runtime.threads import SerialThread

E = TypeVar("E", bound=Env)
_METHODS = ("reset", "step", "score", "score_group", "summarize", "health_check", "close")


def thread_methods(env: E) -> E:
    """Make the plain methods of a sync environment async: each runs in one thread of its own; return the environment.

    An environment without ``sync = True`` stays as it is. So do the methods that are ``async def``. Methods marked
    ``@tool`` that are plain run in the same thread: a call at a time.
    """
    cls: Any = type(env)
    if cls.sync:
        env.__class__ = _build_async_class(cls)
        env._thread = thread = SerialThread()
        weakref.finalize(env, thread.end).atexit = False
    return env


def check_sync(cls: type[Env]) -> None:
    """Raise ContractError where ``sync`` is no bool, or True and no method is plain."""
    sync: object = cls.sync
    if not isinstance(sync, bool):
        raise ContractError(f"{cls.__name__}.sync is {sync!r:.80}; it is True or False")
    if sync and not list_plain_methods(cls):
        names = ", ".join(_METHODS[:-1])
        raise ContractError(
            f"{cls.__name__}.sync is True, and it has no plain method: {names} and {_METHODS[-1]} are `async def`; "
            "leave `sync` out"
        )


def list_plain_methods(cls: type[Env]) -> list[str]:
    """List the methods of the contract that are no ``async def``."""
    return [name for name in _METHODS if not inspect.iscoroutinefunction(getattr(cls, name))]


@lru_cache(maxsize=64)
def _build_async_class(cls: Any) -> Any:
    """Build a subclass with the plain methods made async, under the same name."""
    if "_plain" in vars(cls):  # it is one
        return cls
    methods = {name: _make_async(getattr(cls, name)) for name in list_plain_methods(cls)}
    named = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {**named, **methods, "close_tools": _end_after(cls.close_tools), "_plain": True})


def _make_async(method: Callable[..., object]) -> Callable[..., object]:
    @wraps(method)
    async def call(self: Env, *arguments: object, **named: object) -> object:
        assert self._thread is not None
        result = await self._thread.run(partial(method, self, *arguments, **named))
        return await result if inspect.isawaitable(result) else result

    return call


def _end_after(close_tools: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @wraps(close_tools)
    async def call(self: Env) -> None:
        try:
            await close_tools(self)
        finally:
            if self._thread is not None:
                self._thread.end()

    return call
