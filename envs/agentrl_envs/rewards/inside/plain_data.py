"""Values as JSON, and back: what crosses between a submission and its tests. Nothing else does, no pickle, no object.

    None, bool, int, float (nan, inf, -0.0), str, list     as JSON has them
    {"i": "0x.."} a large int    {"t": [..]} tuple          {"s": [..]} set    {"z": [..]} frozenset
    {"d": [[key, value], ..]}    {"b": hex} bytes           {"c": [re, im]}    {"r": [start, stop, step]} range
    {"D": "1.5"} Decimal         {"F": ["0x1", "0x2"]} Fraction

Anything else is left to ``other``: a process may keep it and send a number for it.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

Value = Any  # of Python
Data = Any  # in JSON's terms
Convert = Callable[[Any], Any]
DEPTH = 100  # of values in values
_ITEMS: dict[Any, str] = {list: "", tuple: "t", set: "s", frozenset: "z"}
_PLAIN: tuple[Any, ...] = (int, float, str, bytes, tuple, list, dict, set, frozenset)
_SMALL = 1 << 63


def encode_value(value: Value, other: Convert, depth: int = DEPTH) -> Data:
    """Convert a value to JSON's terms. Raises ValueError if it is nested too deeply, as one that holds itself is."""
    if depth == 0:
        raise ValueError(f"values nested more than {DEPTH} deep")
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"i": hex(value)}
    if kind in _ITEMS:
        items = [encode_value(item, other, depth - 1) for item in value]
        return items if kind is list else {_ITEMS[kind]: items}
    if kind is dict:
        return {"d": [[encode_value(k, other, depth - 1), encode_value(v, other, depth - 1)] for k, v in value.items()]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is range:
        return {"r": [encode_value(n, other) for n in (value.start, value.stop, value.step)]}
    if (kind.__module__, kind.__name__) == ("decimal", "Decimal"):
        return {"D": str(value)}
    if (kind.__module__, kind.__name__) == ("fractions", "Fraction"):
        return {"F": [hex(value.numerator), hex(value.denominator)]}
    return other(value)


def reduce(value: Value) -> Value:
    """Return the plain value that an instance of a subclass, such as a ``Counter``, is; ``...`` if it is none.

    An array, or a number, of numpy's is what its ``tolist`` gives.
    """
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    for plain in _PLAIN:
        if isinstance(value, plain) and type(reduced := plain(value)) is plain:
            return reduced
    return ...


def list_classes(kind: type[BaseException]) -> list[str]:
    """List the names of an exception's classes, up to the first that is Python's own."""
    names = []
    for cls in kind.__mro__:
        names.append(str(cls.__name__))
        if getattr(builtins, cls.__name__, None) is cls:
            break
    return names


def decode_value(data: Data, other: Convert) -> Value:
    """Convert JSON's terms to a value. ``other`` gets an object that is none of the above."""
    if isinstance(data, list):
        return [decode_value(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, body),) = data.items()
    if tag == "d":
        return {decode_value(k, other): decode_value(v, other) for k, v in body}
    if tag in ("t", "s", "z"):
        return {"t": tuple, "s": set, "z": frozenset}[tag](decode_value(item, other) for item in body)
    if tag == "i":
        return int(body, 16)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag == "r":
        return range(*(decode_value(n, other) for n in body))
    if tag == "D":
        from decimal import Decimal

        return Decimal(body)
    if tag == "F":
        from fractions import Fraction

        return Fraction(int(body[0], 16), int(body[1], 16))
    return other(data)


def canonicalize(data: Data) -> str:
    """Write encoded data so that equal values are equal texts, without building any hash table of it.

    1 and 1.0 are equal, True and 1 are not, nan is nan. As JSON has it, a tuple is a list and a dict's keys are text.

    Raises:
        ValueError, TypeError, RecursionError: it is not what `encode_value` makes.
    """
    if isinstance(data, bool) or data is None or isinstance(data, str):
        return json.dumps(data)
    if isinstance(data, int):
        return hex(data)
    if isinstance(data, float):
        return hex(int(data)) if data.is_integer() else data.hex()
    if isinstance(data, list):
        return f"[{','.join(canonicalize(item) for item in data)}]"
    ((tag, body),) = data.items()
    if tag == "i":
        return hex(int(body, 16))
    if tag == "t":
        return canonicalize(body)
    if tag in ("s", "z"):
        return f"{{{','.join(sorted(canonicalize(item) for item in body))}}}"
    if tag == "d":
        return f"d{{{','.join(sorted(f'{_key(k)}:{canonicalize(v)}' for k, v in body))}}}"
    if tag in ("b", "c", "r", "D", "F"):
        return json.dumps(data)
    raise ValueError(f"{tag!r} is no plain value")


def _key(data: Data) -> str:
    """Write a dict's key, as text if JSON would."""
    plain = data is None or isinstance(data, bool | int | float)
    return json.dumps(json.dumps(data)) if plain else canonicalize(data)
