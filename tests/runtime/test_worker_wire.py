"""What crosses to a worker and back is plain data, and comes out as it went in."""

from __future__ import annotations

import io
import math
import signal
from collections import Counter
from typing import Any, NamedTuple

import pytest

from agentrl.runtime.worker_wire import NotPlainError, WireError, pack_value, read_frame, unpack_value, write_frame


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -1, 1 << 62, 1 << 63, -(1 << 5000), 0.1, -0.0, math.inf, "", "\ud800 \u2028 \x00 é"),
        *(b"", bytes(range(256)), [], (), {}, set(), frozenset({(1, b"x")}), {1: "a", None: 2, (1, 2): {"b": []}}),
        *({"~": 1, "of": [2]}, {"~": "tuple", "of": [1]}, [[{"a": ({"b": (1.5, None)},)}]]),
    ],
)
def test_a_value_comes_out_as_it_went_in(value: Any) -> None:
    returned = unpack_value(pack_value(value))
    assert returned == value
    assert type(returned) is type(value)
    assert repr(returned) == repr(value)


def test_nan_is_nan_and_an_instance_of_a_subclass_is_what_it_is_a_subclass_of() -> None:
    assert math.isnan(unpack_value(pack_value(math.nan)))
    kinds = [Counter("aa"), Pair(1, 2), signal.SIGHUP, bytearray(b"x")]
    assert unpack_value(pack_value(kinds)) == [{"a": 2}, (1, 2), 1, b"x"]
    assert [type(one) for one in unpack_value(pack_value(kinds))] == [dict, tuple, int, bytes]


def test_what_is_not_plain_is_named() -> None:
    for value, words in (
        (object(), "a builtins.object"),
        ([1j], "a builtins.complex"),
        ({"a": len}, "builtin_function"),
    ):
        with pytest.raises(NotPlainError, match=words):
            pack_value(value)
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(NotPlainError, match="nested more than 100 deep"):
        pack_value(itself)
    with pytest.raises(NotPlainError, match="more than 10,000 items"):
        pack_value(set(range(10_001)))
    with pytest.raises(NotPlainError, match="13 bytes, more than 10"):
        pack_value("x" * 11, 10)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"~": 1}', b'{"~": "int", "of": []}', b'{"~": "bytes", "of": "?"}', b'{"~": [], "of": []}']
)
def test_what_is_no_value_is_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        unpack_value(content)


def test_a_frame_takes_memory_as_it_comes() -> None:
    stream = io.BytesIO()
    write_frame(stream, b"D", b"abc")
    assert read_frame(io.BytesIO(stream.getvalue())) == (b"D", b"abc")
    assert read_frame(io.BytesIO(stream.getvalue()[:-1])) is None
    promised = b"D" + (1 << 61).to_bytes(8, "big") + b"abc"
    assert read_frame(io.BytesIO(promised)) is None
    with pytest.raises(WireError, match="more than 1,000"):
        read_frame(io.BytesIO(promised), 1000)
