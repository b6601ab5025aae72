"""Words for what goes wrong: one class for each of the three kinds of mistake, and one for the user's."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class UserError(Exception):
    """A user's mistake, told in a sentence: what is wrong, the value, the way out. The CLI prints it and exits 2."""


class ConfigError(UserError):
    """A setting that does not exist, has the wrong type, or contradicts another one."""


class ContractError(UserError):
    """An environment, tool or reward function returned something its contract does not allow."""


class TemplateError(UserError):
    """A chat template that cannot be followed token by token."""


class ToolError(Exception):
    """Raised by a tool to say no: the message goes to the model, which may read it and learn from it."""


class WorldFault(Exception):
    """The world failed (a time-out, a dead server, an environment that raised): ends the episode, teaches nothing.

    ``kind`` is a short stable word, such as ``tool_timeout``: faults are counted by it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[WorldFault], tuple[str, str]]:
        return type(self), (self.kind, str(self))  # a worker process may raise it


class Interrupted(KeyboardInterrupt):
    """Raised where a signal ends a run at once; ``signal`` is which."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the closest known word: ``; did you mean 'math-tools'?``, or all known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""
