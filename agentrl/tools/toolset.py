"""A toolset: tools that hold something together, such as a sandbox, a database or a server's session."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self

from agentrl.errors import ContractError
from agentrl.settings import registry
from agentrl.settings.signature import convert_settings
from agentrl.tools.tool import Tool, wrap_function


class Toolset:
    """Tools with something of their own. The one in ``ToolEnv.tools`` is the pattern; each episode has a copy.

    Subclasses take their settings (``--tool.NAME.SETTING value``) as keyword arguments of ``__init__``, and mark
    methods with ``@tool``, or write ``tool_list``. Make what is expensive once a run, in ``open``; it is
    ``self.shared`` then.
    """

    shared: Any = None
    named_by: ClassVar[str | None] = None  # the setting that ``NAME:VALUE`` gives

    def __init__(self) -> None: ...

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        """Open what all episodes of a run share, and yield it."""
        yield None

    def describe_shared(self, shared: Any) -> str | None:
        """Return a line on what is open, said as a run begins, such as which walls a sandbox has here."""
        return None

    def begin(self) -> None:
        """Make what an episode has for itself; ``self`` is its copy."""

    def fork(self) -> Self:
        """Return a second one in the same state, for a branch of the episode: by default a copy.

        A toolset with a `begin` keeps something for each episode, of which a copy would hold the same: it writes a
        ``fork`` of its own, or is refused.

        Raises:
            ContractError: it cannot be forked.
        """
        if type(self).begin is not Toolset.begin:
            raise fork_error(self, "it keeps something for each episode, and has no method fork that copies it")
        return copy.copy(self)

    async def close(self) -> None:
        """Let go of what the episode held."""

    async def health_check(self) -> None:
        """Raise if the tools do not work now: a harmless request of your own.

        Called on a fresh copy, begun for it, when an episode's call failed: where this passes, that call's own request
        provoked the failure. Without it the other episodes' calls are the evidence (docs/faults.md).
        """
        raise NotImplementedError

    async def _check_afresh(self) -> None:
        fresh = self.start_episode(self.shared)
        try:
            await fresh.health_check()
        finally:
            await fresh.close()

    def checked_tools(self) -> list[Tool]:
        """List the tools; each without a health check of its own has the toolset's, if that has one."""
        if type(self).health_check is Toolset.health_check:
            return list(self.tool_list)
        return [replace(t, health_check=t.health_check or self._check_afresh) for t in self.tool_list]

    @property
    def tool_list(self) -> Sequence[Tool]:
        """List the methods marked ``@tool``."""
        attributes = {k: v for c in reversed(type(self).__mro__) for k, v in vars(c).items()}
        return [t.bind(self) if t.is_method else t for t in attributes.values() if isinstance(t, Tool)]

    @property
    def key(self) -> str:
        """Return the key by which patterns of the same class and settings share what is open."""
        return f"{type(self).__module__}.{type(self).__qualname__}{sorted(vars(self).items())}"

    def start_episode(self, shared: Any) -> Self:
        """Return a copy for one episode, begun."""
        own = copy.copy(self)
        own.shared = shared
        own.begin()
        return own


def fork_error(toolset: Toolset, why: str) -> ContractError:
    """Make the error of a toolset in a rollout that branches."""
    return ContractError(
        f"the toolset {type(toolset).__name__} cannot be forked: {why}; leave it out, or set branches 1"
    )


def load_tool(name: str, settings: Mapping[str, Any] | None = None) -> Tool | Toolset:
    """Load the tool or toolset called ``name``, or ``NAME:VALUE`` for a toolset that takes one, with its settings.

    Raises:
        UserError: there is none; ContractError: it has no such setting.
    """
    loaded, member = registry.load_member("tool", name)
    registry.check_needs(f"tool {name.partition(':')[0]!r}", loaded)
    if isinstance(loaded, type) and issubclass(loaded, Toolset):
        values = dict(settings or {})
        if member is not None and loaded.named_by is not None:
            values[loaded.named_by] = member
        short = registry.derive_settings_key(name)
        return loaded(**convert_settings(loaded, values, f"tool {name!r}", f"tool.{short}", (short, loaded.named_by)))
    if settings:
        raise ContractError(f"tool {name!r} has no settings; {', '.join(settings)} was given")
    return as_tool(loaded, f"tool {name!r}")


def as_tool(thing: object, what: str) -> Tool | Toolset:
    """Return a tool or a toolset as it is, a toolset of its class, and a tool of a plain function.

    Args:
        what: how a sentence calls the place where it was given, such as ``Shop.tools``.

    Raises:
        ContractError: it is none of these.
    """
    if isinstance(thing, type) and issubclass(thing, Toolset):
        return thing()
    return thing if isinstance(thing, Tool | Toolset) else wrap_function(thing, what)
