"""Escaping of text that others wrote: a model, a tool, a data set. Characters that are invisible or steer a terminal
are spelled out.

The terminal, the page and the report all use it. ``static/dom.js`` has the same rule for the browser; a browser test
compares the two over all of Unicode.
"""

from __future__ import annotations

import re
import unicodedata
from html import escape

# By general category: controls, invisible and directional marks, half surrogates, private and unassigned code points,
# line and paragraph separators.
_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters and marks that are drawn as nothing, which Unicode calls Default_Ignorable_Code_Point. A variation selector 15
# or 16 is part of an emoji, unless another selector stands before it.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0d\U000e0100-\U000e01ef]"
    "|(?<![^\ufe00-\ufe0f])[\ufe0e\ufe0f]"
)
_ODD = re.compile("[^\t\n -~]")  # only these are looked at one by one
_CONTROLS = re.findall(
    r"\w+",
    "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC"
    " FS GS RS US",
)


def escape_controls(text: str, *, newlines: bool = True) -> str:
    """Return the text with each character that is invisible or moves others as ``[ESC]`` or ``[U+202E]``.

    Args:
        newlines: keep line ends and tabs; else they become signs, and the text is one line.
    """
    escaped = _ODD.sub(_escape_match, text)
    return escaped if newlines else escaped.replace("\n", "\u23ce").replace("\t", "\u21e5")


def escape_html(text: str) -> str:
    """Return the text for HTML, in an element or a quoted attribute, with its control characters spelled out."""
    return escape(escape_controls(text))


def _escape_match(match: re.Match[str]) -> str:
    character = match[0]
    if unicodedata.category(character) in _CATEGORIES or _BLANK.match(match.string, match.start()):
        return _spell_out(character)
    return character


def _spell_out(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return f"[{_CONTROLS[code]}]"
    return "[DEL]" if code == 0x7F else f"[U+{code:04X}]"


def truncate(text: str, limit: int) -> str:
    """Return at most ``limit`` characters, and how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def shorten_fault(message: str) -> str:
    """Return a fault's message, its traceback shortened to the last line."""
    before, mark, trace = message.partition("Traceback (most recent call last)")
    lines = trace.strip().splitlines()
    return f"{before}{lines[-1].strip()}" if mark and lines else message
