"""Text that others wrote, made safe to look at: what is invisible or moves the text around is spelled out."""

from __future__ import annotations

import re

# Controls but tab and newline, what changes the direction, what has no width, tags, half surrogates.
_HIDDEN = re.compile(
    "([\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff])"
)


_CONTROLS = re.findall(
    r"\w+",
    "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC"
    " FS GS RS US",
)


def visible(text: str, *, newlines: bool = True) -> str:
    """With ``[ESC]`` for a control character, and ``[U+202E]`` for others that cannot be seen."""
    shown = _HIDDEN.sub(lambda m: _spelled(m[1]), text)
    return shown if newlines else shown.replace("\n", "\u23ce").replace("\t", "\u21e5")


def _spelled(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return f"[{_CONTROLS[code]}]"
    return "[DEL]" if code == 0x7F else f"[U+{code:04X}]"


def cut(text: str, limit: int) -> str:
    """At most so many characters, and how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"
