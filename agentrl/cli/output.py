"""Output of the verbs: the one place from which text goes to a person.

It ends no run: a broken pipe, a closed terminal or a full disk only silence it. No secret is in it, and no control
character but those that a `Console` draws with: what a model or a tool wrote is spelled out.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import IO, Any, TextIO

import rich.console
from rich.segment import Segment

from agentrl.settings.secret import scrub
from agentrl.view.escaping import escape_controls


class Console(rich.console.Console):
    """rich's console, whose colours and moves are its own: control characters within texts are spelled out."""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))

    @property
    def file(self) -> IO[str]:
        stream: IO[str] = super().file
        return _Styled(stream) if isinstance(stream, _SafeStream) else stream  # type: ignore[return-value]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file


class _SafeStream(io.TextIOWrapper):
    """A stream that a person reads."""

    def write(self, text: str, /) -> int:
        super().write(escape_controls(scrub(text)))
        return len(text)

    def write_styled(self, text: str) -> int:
        super().write(scrub(text))
        return len(text)


class _Styled:
    """The stream as a `Console` writes to it: with control characters of its own."""

    def __init__(self, stream: _SafeStream) -> None:
        self._stream, self.write = stream, stream.write_styled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _SilentFile(io.FileIO):
    """A file descriptor; what cannot be written to it is dropped."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def print_line(console: Console, text: str) -> None:
    """Print text as it is, control characters escaped: no markup, no colours, no wrapping."""
    console.print(escape_controls(text), markup=False, highlight=False, soft_wrap=True)


def show_loading(console: Console) -> AbstractContextManager[object]:
    """Show on a terminal that something happens while torch and transformers are imported."""
    return console.status("loading torch and transformers") if console.is_terminal else nullcontext()


@contextmanager
def silence_when_closed() -> Iterator[None]:
    """Replace ``sys.stdout`` and ``sys.stderr`` until the block ends, if they are files."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = after = tuple(map(_silent, before))
    try:
        yield
    finally:
        for stream in filter(None, after):  # a closed descriptor is None
            stream.flush()
        sys.stdout, sys.stderr = before


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what ended the process, as Python does, without secrets and control characters."""
    lines = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(escape_controls(scrub(lines)))


def _silent(stream: TextIO) -> TextIO:
    """Return a stream on the same descriptor; or the stream itself, if it is a test's or a notebook's."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer
    if type(raw) is not io.FileIO:
        return stream
    stream.flush()
    silent = _SilentFile(raw.fileno(), "w", closefd=False)
    return _SafeStream(
        silent if stream.buffer is raw else io.BufferedWriter(silent),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,  # a terminal of ASCII
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
