"""One session: a process with a namespace of its own that runs one piece of code after another.

It speaks with the server by a socket: in comes code, out goes how it ended. What the code prints goes down a pipe of
its own, so that nothing it writes can be taken for anything else.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import os
import struct
import sys
import traceback

FILE = "<code>"
STARTED, DONE, RAISED = b"s", b"d", b"r"


def serve(control: int) -> None:
    """Run pieces of code in the new process, which has given up all it will, until it ends."""
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": builtins}
    while (code := _receive(control)) is not None:
        ended = _run(code, names)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the code may have closed it
                stream.flush()
        os.write(control, ended)
    os._exit(0)


def _receive(control: int) -> str | None:
    head = _read_exactly(control, 4)
    if head is None:
        return None
    body = _read_exactly(control, struct.unpack("=I", head)[0])
    return None if body is None else body.decode()


def _read_exactly(control: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        if not (part := os.read(control, min(size - len(data), 1 << 16))):
            return None
        data += part
    return bytes(data)


def _run(code: str, names: dict[str, object]) -> bytes:
    """Run it; the value of a last expression is shown, as at Python's own prompt."""
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    try:
        tree = ast.parse(code, FILE)
        last = tree.body[-1] if tree.body else None
        shown = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
        tree.body = tree.body[:-1] if shown is not None else tree.body
        exec(compile(tree, FILE, "exec"), names)
        if shown is not None:
            value = eval(compile(shown, FILE, "eval"), names)
            if value is not None:
                print(repr(value))
        return DONE
    except SystemExit as end:
        return DONE if end.code in (None, 0) else RAISED
    except BaseException as error:
        _print_traceback(error)
        return RAISED


def _print_traceback(error: BaseException) -> None:
    """Write the traceback, without our own frames."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != FILE:
        at = at.tb_next
    try:
        lines = traceback.format_exception(type(error), error, at, limit=-8)
        sys.stderr.write("".join(lines))
    except BaseException:  # its __str__ raises, or memory is gone
        os.write(2, f"{type(error).__name__}\n".encode())
