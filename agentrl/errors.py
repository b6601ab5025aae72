"""The exceptions: one class for each of the three kinds of mistake, and one for the user's."""

from __future__ import annotations

import asyncio
import difflib
import signal
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},)
_LIBRARIES += (str(Path(__file__).parent),)


class UserError(Exception):
    """A user's mistake, as a sentence: the mistake, the value, the way out. The CLI prints it and exits 2.

    A notebook shows the sentence, and no traceback.
    """

    exit_status = 2

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [f"agentrl: {self}"]


class ConfigError(UserError):
    """A setting that does not exist, has the wrong type, or contradicts another one."""


class ProcessLostError(UserError):
    """Another process of the run is gone. Nobody's mistake: the same command may succeed, and the CLI exits 75."""

    exit_status = 75  # EX_TEMPFAIL of sysexits.h


class ContractError(UserError):
    """An environment, tool or reward function returned something its contract does not allow."""


class NoExpertError(ContractError):
    """An environment has no expert: none was written, or none knows these tasks."""


class TemplateError(UserError):
    """A chat template that cannot be followed token by token."""


class ToolError(Exception):
    """A tool's refusal: the message goes to the model, which may read it and learn from it.

    ``kind`` is counted: one of `agentrl.types.TOOL_ERRORS`, ``tool`` where a tool raises it.
    """

    def __init__(self, message: str = "", kind: str = "tool") -> None:
        super().__init__(message)
        self.kind = kind


class InfraError(Exception):
    """The infrastructure failed: a time-out, a dead server, an environment that raised. The episode ends, untrained.

    Args:
        kind: a short stable word, such as ``tool_timeout``: faults are counted by it.
        provoked: whether the episode's own request brought it about, which is the model's mistake. ``None``: evidence
            decides (docs/faults.md).
    """

    def __init__(self, kind: str, message: str, provoked: bool | None = None) -> None:
        super().__init__(message)
        self.kind, self.provoked = kind, provoked

    def __reduce__(self) -> tuple[type[InfraError], tuple[str, str, bool | None]]:
        return type(self), (self.kind, str(self), self.provoked)


class Interrupted(KeyboardInterrupt):
    """The end of a run by a signal, at once; ``signal`` is which."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the closest known word, ``; did you mean 'shop'?``, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or _find_transposed(name, names)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""


def describe_missing_run(folder: Path) -> str:
    """Describe why a folder is no run's."""
    why = "it has no config.toml" if folder.is_dir() else f"there is no such folder (from {Path.cwd()})"
    return f"{str(folder)!r} is no run folder: {why}"


def _find_transposed(name: str, names: Iterable[str]) -> list[str]:
    """Return the word that has most letters of a name, in another order: ``grpo`` for ``gprs``."""
    by_letters = {"".join(sorted(known)): known for known in names}
    close = difflib.get_close_matches("".join(sorted(name)), by_letters, n=1, cutoff=0.75)
    return [by_letters[letters] for letters in close]


def describe_raised(error: BaseException) -> str:
    """Describe an exception of somebody else's code: ``KeyError: 'rows' (city.py, line 12)``, the innermost own line.

    A failed import has no line of its own; of frames within libraries the last one outside of them is named.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_LIBRARIES, "<"))]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}" if str(error) else f"{type(error).__name__}{where}"


@contextmanager
def author_errors(what: str) -> Iterator[None]:
    """Raise ContractError for an exception of the block, which is code of an environment's or a plugin's author.

    Args:
        what: how a sentence calls that code, such as ``CityQuiz.count('test')``.
    """
    try:
        yield
    except UserError:
        raise
    except InfraError as fault:
        raise ContractError(str(fault)) from fault
    except (Exception, SystemExit) as error:
        raise ContractError(f"{what} raised {describe_raised(error)}") from error


def is_failure(error: BaseException) -> bool:
    """Return True if an exception from an environment's code is a failure of that code: neither Ctrl-C nor an end."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is None
    return not isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
