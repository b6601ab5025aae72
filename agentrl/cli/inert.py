"""Text of models, tools and datasets, for a terminal: what could steer it is spelt out."""

from __future__ import annotations

import unicodedata

_SPELT = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # controls, invisible and directional marks, halves, the unassigned


def inert(text: str, *, lines: bool = False) -> str:
    """With escapes such as ``\\x1b`` for characters that are no text; line ends and tabs stay where ``lines``."""
    return "".join(c if _is_text(c) or (lines and c in "\n\t") else _spelt(c) for c in text)


def _is_text(char: str) -> bool:
    return unicodedata.category(char) not in _SPELT


def _spelt(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
