"""The wire between this process and its workers: frames of plain data, so that reading one runs nothing.

A frame is a letter, eight bytes of length, and so many bytes. Q is a question; its answer is D, data, or X, an
exception. (Where an answer has pieces, E ends it.) A value crosses as JSON:

    None, bool, int, float (nan and inf too), str, list, dict with keys of text        as they are
    {"~": "tuple", "of": [..]}    also set, frozenset; and dict, of pairs, where a key is no text
    {"~": "bytes", "of": base64}    {"~": "int", "of": "0x.."} where it is long

An instance of a subclass of these crosses as what it is a subclass of. Only the standard library is imported here: the
programs of workers load this file by its path.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
from typing import Any, BinaryIO

MAX_VALUE = 16 << 20  # bytes of a value that a worker sends: as objects it may take twenty times that
MAX_DEPTH = 100  # of values in values
MAX_HASHED = 10_000  # keys that are no text, whose hashes can be chosen to be the same
_TAG = "~"
_SMALL = 1 << 63
_PART = 1 << 20
_ITEMS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class WireError(ValueError):
    """Something on the wire that is no frame, or no value."""


class NotPlainError(TypeError):
    """A value that cannot cross; the text says what it is."""


def write_frame(stream: BinaryIO, kind: bytes, content: bytes = b"") -> None:
    """Write a frame."""
    left = memoryview(kind + len(content).to_bytes(8, "big") + content)
    while left:  # a stream without a buffer takes a part
        left = left[stream.write(left) :]
    stream.flush()


def read_frame(stream: BinaryIO, most: int = 1 << 62) -> tuple[bytes, bytes] | None:
    """Read a frame; None where the stream ends before it does. Raises WireError: it has more than ``most`` bytes."""
    head = stream.read(9)
    while 0 < len(head) < 9 and (part := stream.read(9 - len(head))):
        head += part
    if len(head) < 9:
        return None
    left, parts = int.from_bytes(head[1:], "big"), []
    if left > most:
        raise WireError(f"a frame of {left:,} bytes, more than {most:,}")
    while left:  # memory is taken as the bytes come, not as they are promised
        if not (part := stream.read(min(left, _PART))):
            return None
        parts.append(part)
        left -= len(part)
    return head[:1], b"".join(parts)


def is_silent(stream: Any) -> bool:
    """Return whether nothing waits to be read from a pipe without a buffer, nor its end."""
    try:
        return not select.select([stream], [], [], 0)[0]
    except (OSError, ValueError):  # it is closed, or this system selects sockets alone
        return not stream.closed


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return a worker's standard input and output, for frames alone: what runs there reads and prints nothing.

    Signals of a terminal are ignored: it tells everybody, and the starting process decides.
    """
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    return streams


def pack_value(value: Any, most: int = 1 << 62) -> bytes:
    """Write a value as JSON. Raises NotPlainError: it is not plain data, or has more than ``most`` bytes."""
    text = json.dumps(_encode(value, MAX_DEPTH), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(text) > most:
        raise NotPlainError(f"{len(text):,} bytes, more than {most:,}")
    return text


def unpack_value(content: bytes) -> Any:
    """Read what `pack_value` wrote. Raises WireError: it is nothing that it writes."""
    try:
        return _decode(json.loads(content.decode("utf-8", "surrogatepass")), 2 * MAX_DEPTH)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from None


def _encode(value: Any, depth: int) -> Any:
    if depth < 0:
        raise NotPlainError(f"values nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if -_SMALL < value < _SMALL else {_TAG: "int", "of": hex(value)}
    if isinstance(value, list):
        return [_encode(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return _encode_dict(value, depth - 1)
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    for name, kind in _ITEMS.items():
        if isinstance(value, kind):
            if kind is not tuple:
                _check_hashed(len(value), NotPlainError)
            return {_TAG: name, "of": [_encode(item, depth - 1) for item in value]}
    raise NotPlainError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _encode_dict(value: dict[Any, Any], depth: int) -> Any:
    if _TAG not in value and all(isinstance(key, str) for key in value):
        return {key: _encode(item, depth) for key, item in value.items()}
    _check_hashed(len(value), NotPlainError)
    return {_TAG: "dict", "of": [[_encode(key, depth), _encode(item, depth)] for key, item in value.items()]}


def _check_hashed(size: int, error: type[Exception]) -> None:
    if size > MAX_HASHED:
        raise error(f"a set, or a dict with keys that are no text, of more than {MAX_HASHED:,} items")


def _decode(tree: Any, depth: int) -> Any:
    if depth < 0:
        raise WireError("it is nested too deeply")
    if isinstance(tree, list):
        return [_decode(item, depth - 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TAG not in tree:
        return {key: _decode(item, depth - 1) for key, item in tree.items()}
    kind, content = tree[_TAG], tree["of"]
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    items = _decode(list(content), depth - 1)
    if kind == "tuple":
        return tuple(items)
    _check_hashed(len(items), WireError)
    return dict(items) if kind == "dict" else _ITEMS[kind](items)
