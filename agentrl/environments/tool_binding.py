"""The tools of a run's environments: those that their class lists, those that the run adds, and what they share."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from agentrl.errors import ContractError, author_errors, suggest
from agentrl.runtime.threads import enter_in_thread
from agentrl.settings import registry
from agentrl.tools.tool import Tool
from agentrl.tools.toolset import Toolset, as_tool, load_tool

ToolSpec = Tool | Toolset | type[Toolset] | str | Callable[..., object]  # the last: a plain function
ToolSettings = Mapping[str, Mapping[str, Any]]  # by the tool's name


class _ToolOwner(Protocol):
    """A `ToolEnv`, as far as its tools are concerned."""

    tools: Sequence[ToolSpec]

    @classmethod
    def marked_tools(cls) -> Sequence[Tool]: ...


class ToolBinding:
    """The tools of a run's environments: its extra tools, their settings, and what toolsets share while it runs.

    Args:
        extra_tools: tools that every environment has beside its own.
        settings: of tools that are listed by name.
    """

    def __init__(self, extra_tools: Sequence[ToolSpec] = (), settings: ToolSettings | None = None) -> None:
        self.extra_tools, self.settings = extra_tools, settings or {}
        self.notes: list[str] = []  # what toolsets say of what they opened
        self._shared: dict[str, Any] = {}  # by the toolset's key
        self._of_class: dict[type[_ToolOwner], list[Tool | Toolset]] = {}

    def load_extra_tools(self) -> None:
        """Load the extra tools, each one once. Raises UserError where there is none of that name, or it is none."""
        for t in self.extra_tools:
            if isinstance(t, str):
                load_tool(t, self.settings.get(registry.derive_settings_key(t)))
        self.extra_tools = [t if isinstance(t, str) else as_tool(t, "tools") for t in self.extra_tools]

    def list_patterns(self, env: _ToolOwner) -> list[Tool | Toolset]:
        """List an environment's marked methods, then the tools it names, then the run's; looked up once a class."""
        cls = type(env)
        if "tools" in vars(env):
            return self._resolve(cls, env.tools)
        if cls not in self._of_class:
            self._of_class[cls] = self._resolve(cls, cls.tools)
        return self._of_class[cls]

    @asynccontextmanager
    async def open(self, env: _ToolOwner) -> AsyncIterator[None]:
        """Hold open what the toolsets of such environments share."""
        async with AsyncExitStack() as held:
            for t in self.list_patterns(env):
                if isinstance(t, Toolset) and t.key not in self._shared:
                    shared = await enter_author_context(held, f"{type(t).__name__}.open", t.open)
                    self._shared[t.key] = shared
                    if (note := t.describe_shared(shared)) and note not in self.notes:
                        self.notes.append(note)
            try:
                yield
            finally:
                self._shared.clear()

    def start_toolset(self, pattern: Toolset, env: _ToolOwner) -> Toolset:
        """Return an episode's own copy of a toolset."""
        if pattern.key not in self._shared:
            raise ContractError(
                f"{type(env).__name__} uses the toolset {type(pattern).__name__}, which is not open: make the "
                "environment by `async with EnvSpec(...).open() as spec: spec.make()`, and list its tools in the class "
                "or in __init__"
            )
        return pattern.start_episode(self._shared[pattern.key])

    def _resolve(self, cls: type[_ToolOwner], tools: Sequence[ToolSpec]) -> list[Tool | Toolset]:
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            raise ContractError(
                f"{cls.__name__}.tools is {tools!r:.80}; write a list, such as tools = [search, submit]"
            )
        listed = (*tools, *self.extra_tools)
        patterns = [*cls.marked_tools(), *(self._pattern(cls, t) for t in listed)]
        check_tool_names([t.name for t in patterns if isinstance(t, Tool)], cls)
        names = {registry.derive_settings_key(t) for t in listed if isinstance(t, str)}
        for name in self.settings:
            if name not in names:
                raise ContractError(f"tool.{name}: {cls.__name__} has no tool of that name{suggest(name, names)}")
        return patterns

    def _pattern(self, cls: type[_ToolOwner], tool: object) -> Tool | Toolset:
        if isinstance(tool, str):
            return load_tool(tool, self.settings.get(registry.derive_settings_key(tool)))
        return as_tool(tool, f"{cls.__name__}.tools")


def check_tool_names(names: Sequence[str], cls: type) -> None:
    """Raise ContractError where two tools of an environment have one name."""
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ContractError(
            f"{cls.__name__} has two tools called {twice!r}; give one another name: agentrl.tool(name='NAME')(function)"
        )


async def enter_author_context(held: AsyncExitStack, what: str, opening: Callable[[], Any], sync: bool = False) -> Any:
    """Enter an author's async context manager and return its value.

    Args:
        sync: take a plain context manager too, which is entered in a thread.

    Raises:
        ContractError: it is none, or raises as it opens; ``what`` is how the sentence calls it.
    """
    with author_errors(what):
        context = opening()
        if hasattr(context, "__aenter__"):
            return await held.enter_async_context(context)
        if sync and hasattr(context, "__enter__"):
            return await held.enter_async_context(enter_in_thread(context))
    if inspect.iscoroutine(context):
        context.close()
    raise ContractError(f"{what} must be an async context manager: write @asynccontextmanager above it, and yield once")
