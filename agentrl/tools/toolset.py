"""A toolset: tools that hold something together, such as a sandbox, a database or a server's session."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Self

from agentrl import registry
from agentrl.errors import ContractError, UserError
from agentrl.signature import settings_of
from agentrl.tool import Tool


class Toolset:
    """Tools with something of their own. What stands in ``ToolEnv.tools`` is the pattern; each episode has a copy.

    Subclasses take their settings (``--tool.NAME.SETTING value``) as keyword arguments of ``__init__``, and mark
    methods with ``@tool``, or write ``tool_list``. What is expensive is made once a run in ``open``, and found as
    ``self.shared``.
    """

    shared: Any = None
    named_by: ClassVar[str | None] = None  # the setting that ``NAME:VALUE`` gives

    def __init__(self) -> None: ...

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        """What all episodes of a run share, while it lasts."""
        yield None

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
            raise cannot_fork(self, "it keeps something for each episode, and has no method fork that copies it")
        return copy.copy(self)

    async def close(self) -> None:
        """Let go of what the episode held."""

    @property
    def tool_list(self) -> Sequence[Tool]:
        """The methods marked ``@tool``."""
        found = {k: v for c in reversed(type(self).__mro__) for k, v in vars(c).items()}
        return [t.bind(self) if t.is_method else t for t in found.values() if isinstance(t, Tool)]

    @property
    def key(self) -> str:
        """Patterns of the same class and settings share what is open."""
        return f"{type(self).__module__}.{type(self).__qualname__}{sorted(vars(self).items())}"

    def of_episode(self, shared: Any) -> Self:
        own = copy.copy(self)
        own.shared = shared
        own.begin()
        return own


def cannot_fork(toolset: Toolset, why: str) -> ContractError:
    """Make the error of a toolset in a rollout that branches."""
    return ContractError(
        f"the toolset {type(toolset).__name__} cannot be forked: {why}; leave it out, or set branches 1"
    )


def named(name: str, settings: Mapping[str, Any] | None = None) -> Tool | Toolset:
    """The tool or toolset called ``name``, or ``NAME:VALUE`` for a toolset that takes one, with its settings.

    Raises:
        UserError: there is none; ContractError: it has no such setting.
    """
    found, member = registry.member("tool", name)
    registry.check_needs(f"tool {name.partition(':')[0]!r}", found)
    if isinstance(found, type) and issubclass(found, Toolset):
        given = dict(settings or {})
        if member is not None and found.named_by is not None:
            given[found.named_by] = member
        short = name.partition(":")[0]
        return found(**settings_of(found, given, f"tool {name!r}", f"tool.{short}", (short, found.named_by)))
    if settings:
        raise ContractError(f"tool {name!r} has no settings; {', '.join(settings)} was given")
    if not isinstance(found, Tool | Toolset):
        raise UserError(f"tool {name!r} is {found!r:.80}, which is no tool; decorate it with @agentrl.tool")
    return found
