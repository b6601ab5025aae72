"""The tables in the documentation are those of the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.settings.names.page import BEGIN, END, format_trl, format_verl, insert
from agentrl.settings.names.translation import TABLE

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "table"), [("from-trl.md", format_trl()), ("from-verl.md", format_verl())])
def test_a_page_has_the_table_as_it_is(page: str, table: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == insert(text, table), f"{page} is out of date: python -m agentrl.settings.names.page"


def test_every_name_is_on_a_page() -> None:
    pages = format_trl() + format_verl()
    assert [e.name for entries in TABLE.values() for e in entries if f"`{e.name}`" not in pages] == []


def test_what_stands_around_a_table_stays() -> None:
    assert insert(f"a\n{BEGIN}old{END}\nb", "new") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb"
