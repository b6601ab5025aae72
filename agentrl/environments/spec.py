"""An environment's class with its settings: the recipe by which each episode gets a fresh environment."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from operator import index
from typing import Any, Self

from agentrl.environments.agent_env import AgentEnv
from agentrl.environments.env import Env, ToolEnv
from agentrl.environments.sync_env import check_sync, thread_methods
from agentrl.environments.tool_binding import ToolBinding, ToolSettings, ToolSpec, enter_author_context
from agentrl.environments.validation import check_attributes
from agentrl.errors import ConfigError, ContractError, author_errors
from agentrl.settings import registry
from agentrl.settings.schema import TrainConfig
from agentrl.settings.signature import build_arguments_model, convert_settings
from agentrl.tools.tool import Tool

_NOT_SETTINGS = ("env_kwargs", "env_config")  # other libraries' words for env_args


class EnvSpec:
    """An environment class and its settings. `make` makes a fresh environment for each episode."""

    shared: Any = None  # of the run, while it is open
    _is_open = False

    def __init__(self, env: str | type[Env], /, **settings: Any) -> None:
        """Look up the class and check its settings.

        Raises:
            UserError: the name is unknown.
            ContractError: it is no ``Env``, or has no such setting.
        """
        cls, member = registry.load_member("env", env) if isinstance(env, str) else (env, None)
        short = env.partition(":")[0] if isinstance(env, str) else getattr(env, "__name__", "")
        registry.check_needs(f"env {short!r}", cls)
        if not (isinstance(cls, type) and issubclass(cls, Env)):
            raise ContractError(f"env {env!r} is {cls!r:.80}, not a subclass of agentrl.Env")
        check_sync(cls)
        self.cls: type[Env] = cls
        self.source = env  # by which it is made again
        self.name = env if isinstance(env, str) else cls.__name__
        if member is not None and cls.named_by is not None:
            settings = {**settings, cls.named_by: member}
        self.settings = convert_settings(cls, settings, f"env {self.name!r}", "env", (self.name, cls.named_by))
        self.tool_binding = ToolBinding()

    @classmethod
    def from_config(cls, config: TrainConfig) -> EnvSpec:
        """Return the spec that a config names: its environment with its settings, and the run's tools."""
        settings = dict(config.env)
        return cls(settings.pop("name"), **settings).with_tools(config.tools, config.tool)

    def check_run_settings(self, names: Iterable[str]) -> None:
        """Raise ConfigError where an argument of a run is a setting of this environment: it belongs in env_args."""
        own = {f.alias for f in build_arguments_model(self.cls.__init__, f"env {self.name!r}").model_fields.values()}
        for name in names:
            if name in _NOT_SETTINGS:
                raise ConfigError(f"{name}: unknown setting; the environment's own are env_args={{...}}")
            if name in own and name not in TrainConfig.model_fields:
                raise ConfigError(f"{name} is a setting of env {self.name!r}: env_args={{{name!r}: ...}}")

    def with_tools(self, tools: Sequence[ToolSpec] = (), settings: ToolSettings | None = None) -> Self:
        """Add tools, and settings of tools that are named; return this spec.

        Args:
            tools: names, plain functions, tools, or toolsets.

        Raises:
            UserError: there is no tool of that name.
            ContractError: the environment takes no tools, or a tool has no such setting.
        """
        self.tool_binding = ToolBinding(tools, settings)
        if not issubclass(self.cls, ToolEnv) and (tools or settings):
            raise ContractError(f"env {self.name!r} takes no tools; those of a ToolEnv can be added to")
        self.tool_binding.load_extra_tools()
        return self

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EnvSpec]:
        """Hold the run-wide state while the environments live; inside another such block, that one's.

        Raises:
            ContractError: ``open_shared``, ``__init__`` or a toolset's ``open`` raises.
        """
        if self._is_open:
            yield self
            return
        async with AsyncExitStack() as held:
            what, settings = f"{self.cls.__name__}.open_shared", self.settings
            self.shared = await enter_author_context(
                held, what, lambda: self.cls.open_shared(**settings), self.cls.sync
            )
            env = self.sample()
            if isinstance(env, ToolEnv):
                await held.enter_async_context(self.tool_binding.open(env))
            self._is_open = True
            held.callback(setattr, self, "_is_open", False)
            yield self

    def make(self) -> Env:
        """Make a fresh environment."""
        env = thread_methods(self.cls(**self.settings))
        env.shared = self.shared
        if isinstance(env, ToolEnv):
            env.tool_binding = self.tool_binding
        return env

    @property
    def has_health_check(self) -> bool:
        """Return True if the environment has a health check of its own."""
        return self.cls.health_check is not Env.health_check

    @property
    def has_expert(self) -> bool:
        """Return True if the environment has an expert."""
        return self.cls.expert is not Env.expert

    @property
    def brings_agent(self) -> bool:
        """Return True if the environment plays its episodes itself, against an endpoint."""
        return issubclass(self.cls, AgentEnv) and self.cls.brings_agent()

    async def check_health(self) -> None:
        """Call ``health_check`` of a fresh environment, and close that. Raises what it raises."""
        env = self.make()
        try:
            await env.health_check()
        finally:
            await env.close()
            await env.close_tools()

    def sample(self) -> Env:
        """Make an environment whose attributes are read and which is never reset.

        Raises:
            ContractError: ``__init__`` raises, or an attribute is no such thing.
        """
        with author_errors(f"{self.cls.__name__}.__init__"):
            env = self.make()
        check_attributes(env)
        return env

    def list_splits(self) -> Sequence[str]:
        """List the splits of an environment, ``train`` first. Raises ContractError where that raises."""
        env = self.sample()
        with author_errors(f"{self.cls.__name__}.list_splits"):
            return tuple(env.list_splits())

    def tool_list(self) -> Sequence[Tool]:
        """Return the tools of an environment that was not reset. Raises ContractError where that raises."""
        env = self.sample()
        with author_errors(f"{self.cls.__name__}.tool_list"):
            return tuple(env.tool_list)

    def count(self, split: str) -> int | None:
        """Return how many tasks a split has; None where each integer is one.

        Raises:
            ContractError: the environment cannot be made, or its ``count`` raises or returns something else.
        """
        env, what = self.sample(), f"{self.cls.__name__}.count({split!r})"
        with author_errors(what):
            count: Any = env.count(split)
        if inspect.iscoroutine(count):
            count.close()
            raise ContractError(f"{what} must be a plain `def`, not `async def`")
        if count is None:
            return None
        if isinstance(count, bool) or not hasattr(count, "__index__") or index(count) < 0:
            raise ContractError(f"{what} returned {count!r:.80}; it must return a whole number of tasks, or None")
        return index(count)
