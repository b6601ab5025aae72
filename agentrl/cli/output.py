"""Output of the verbs. It ends no run: a broken pipe, a closed terminal or a full disk only silence it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO

from rich.console import Console

from agentrl.view.escaping import escape_controls


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


def _silent(stream: TextIO) -> TextIO:
    """Return a stream on the same descriptor; or the stream itself, if it is a test's or a notebook's."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer
    if type(raw) is not io.FileIO:
        return stream
    stream.flush()
    silent = _SilentFile(raw.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        silent if stream.buffer is raw else io.BufferedWriter(silent),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
