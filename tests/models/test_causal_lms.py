"""Every causal LM of transformers is right, or refused in a sentence; docs/models.md has the table.

One in six of the families, and all where AGENTRL_EVERY_CASE is set (make long ARGS=families).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import transformers

from tests.helpers.causal_lms import (
    ELSEWHERE,
    FAMILIES,
    LISTED,
    OPTIONAL_WINDOWS,
    UNMADE,
    has_optional_windows,
    names,
    subject,
    table_row,
    verdict_in_double,
    verdicts,
)

EVERY_CASE = bool(os.environ.get("AGENTRL_EVERY_CASE"))
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SENTENCE = re.compile(r"(agentrl cannot train|the embedded engine cannot run) (\w+)[^\n]*\)")


LISTED_OF = re.findall(r"is of transformers (\d+\.\d+\.\d+)", PAGE.read_text(encoding="utf-8"))[0]
of_the_table = pytest.mark.skipif(
    transformers.__version__ != LISTED_OF,
    reason=f"docs/models.md lists the families of transformers {LISTED_OF}, not of {transformers.__version__}",
)


def rows() -> dict[str, str]:
    """The table's rows by family."""
    section = PAGE.read_text(encoding="utf-8").partition("## All causal LMs of transformers")[2].partition("\n## ")[0]
    lines = section.splitlines()
    return {line.split("|")[1].strip(): line for line in lines if re.match(r"\| (?!family)[a-z0-9]", line)}


@of_the_table
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")  # transformers' own, of families that it no longer tends
@pytest.mark.parametrize("name", [name for name in names() if name not in UNMADE][:: 1 if EVERY_CASE else 6])
def test_a_causal_lm_is_right_or_refused_in_a_sentence(name: str) -> None:
    model = subject(name)
    found = verdicts(model)
    for way, verdict in found.items():
        if not verdict.right:  # some families magnify the rounding of single precision, which differs between CPUs
            verdict = verdict_in_double(name, way)
        assert verdict.right, f"{way}: off by {verdict.off}"
    for way in ("train", "engine"):
        if (told := found[way].refused) is not None:
            assert SENTENCE.fullmatch(told), told
            assert type(model).__name__ in told
            assert told.endswith((LISTED, ELSEWHERE))
    assert _without_numbers(table_row(name, found)) == _without_numbers(rows()[name])


def _without_numbers(row: str) -> str:
    """Return a row without how far a refused way is off, which differs between CPUs; why it is refused does not."""
    return re.sub(r"off by [\d.e-]+", "off by some", row)


@of_the_table
def test_the_table_has_every_family_and_no_other() -> None:
    found = rows()
    assert [name for name in found if name in FAMILIES] == FAMILIES
    assert list(found) == names()
    for name, why in UNMADE.items():
        assert why in found[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_families_whose_windows_are_off_by_default_are_tried_with_them() -> None:
    assert [n for n in FAMILIES if n not in UNMADE and has_optional_windows(n)] == list(OPTIONAL_WINDOWS)
