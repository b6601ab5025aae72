"""Text that others wrote, made safe to look at, on a terminal as on a page: what is invisible or steers is spelled out.

``static/dom.js`` has the same rule for the browser; a browser test compares the two over all of Unicode.
"""

from __future__ import annotations

import re
import unicodedata

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


def visible(text: str, *, newlines: bool = True) -> str:
    """Spell out as ``[ESC]`` or ``[U+202E]`` whatever cannot be seen or would move the text around it.

    Args:
        newlines: whether line ends and tabs stay; else they are shown as signs, and the text is one line.
    """
    shown = _ODD.sub(_shown, text)
    return shown if newlines else shown.replace("\n", "\u23ce").replace("\t", "\u21e5")


def _shown(found: re.Match[str]) -> str:
    character = found[0]
    if unicodedata.category(character) in _CATEGORIES or _BLANK.match(found.string, found.start()):
        return _spelled(character)
    return character


def _spelled(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return f"[{_CONTROLS[code]}]"
    return "[DEL]" if code == 0x7F else f"[U+{code:04X}]"


def cut(text: str, limit: int) -> str:
    """At most so many characters, and how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"
