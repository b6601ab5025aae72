"""Text of others on a terminal."""

from __future__ import annotations

import pytest

from agentrl.cli.inert import inert


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, \u00fcnic\u00f6de \u4f60\u597d", "plain, \u00fcnic\u00f6de \u4f60\u597d"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202eb\u2028", r"a\u202eb\u2028"),
        ("\ud800", r"\ud800"),
        ("a\tb\r\nc", r"a\tb\r\nc"),
    ],
)
def test_what_could_steer_it_is_spelt_out(text: str, shown: str) -> None:
    assert inert(text) == shown


def test_lines_may_stay() -> None:
    assert inert("a\n\tb\r", lines=True) == "a\n\tb\\r"
