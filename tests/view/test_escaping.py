"""Text of others, made safe to look at: on a terminal, on the page, in a report."""

from __future__ import annotations

import unicodedata
from random import Random

import pytest

from agentrl.view.escaping import escape_controls, truncate

EVERY = [chr(code) for code in range(0x110000)]
STEERS = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, \u00fcnic\u00f6de \u4f60\u597d \U0001f600 \u05e9 1\ufe0f\u20e3 \u2764\ufe0f", None),
        ("\x1b[2J\x07", "[ESC][2J[BEL]"),
        ("\x9b31m\x7f", "[U+009B]31m[DEL]"),
        ("a\u202eb\u2028", "a[U+202E]b[U+2028]"),
        ("\ud800", "[U+D800]"),
        ("a\tb\r\nc", "a\tb[CR]\nc"),
        ("x\u200b\u3164\u034f\U000e0041\U000e0101", "x[U+200B][U+3164][U+034F][U+E0041][U+E0101]"),
        ("a\ufe0f\ufe0e\ufe01", "a\ufe0f[U+FE0E][U+FE01]"),
        ("\ufe0fa", "[U+FE0F]a"),
    ],
)
def test_what_could_steer_or_hide_is_spelled_out(text: str, shown: str | None) -> None:
    assert escape_controls(text) == (text if shown is None else shown)


def test_in_one_line_line_ends_and_tabs_are_signs() -> None:
    assert escape_controls("a\n\tb\r", newlines=False) == "a\u23ce\u21e5b[CR]"


def test_no_code_point_that_steers_or_hides_comes_through() -> None:
    """All of Unicode, as the interpreter knows it."""
    for character in EVERY:
        if unicodedata.category(character) in STEERS and character not in "\t\n":
            assert escape_controls(f"a{character}b").isascii(), hex(ord(character))


def test_what_can_be_printed_stays_as_it_is() -> None:
    kept = [c for c in EVERY if c.isprintable() and escape_controls(c) == c]
    printable = sum(c.isprintable() for c in EVERY)
    assert printable - len(kept) < 300  # the blank letters, and variation selectors
    assert escape_controls("".join(kept)) == "".join(kept)


def test_texts_of_any_characters_are_shown_whole_in_one_line_and_once() -> None:
    random = Random(0)
    odd = ["\x1b", "\u202e", "\n", "\t", "\ufe0f", "\ufe0e", "\u0301", "\ud83d", "[", "\u2028", "\r", "\x85"]
    for _ in range(500):
        text = "".join(random.choice([*odd, "a", "\u4f60"]) for _ in range(random.randrange(12)))
        shown = escape_controls(text, newlines=False)
        assert len(shown.splitlines()) <= 1
        assert not any(unicodedata.category(c) in STEERS for c in shown)
        assert escape_controls(shown, newlines=False) == shown
        assert len(shown) >= len(text)


def test_a_long_text_is_cut_and_says_by_how_much() -> None:
    assert truncate("abcdef", 3) == "abc [... 3 more characters]"
