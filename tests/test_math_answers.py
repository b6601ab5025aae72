"""The rewards `math` and `accuracy` over golds as datasets write them, row by row: --golden FILE for any such file.

A row of the file: completion, solution, expected, and trl_1_16, what TRL's accuracy_reward says of it. In the second
file of our own the two differ in places; each stands there because TRL's parser needs dollar signs around a gold, takes
only ``\\boxed{`` letter by letter for a box, joins boxes to a set, or takes an answer out of a thought.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.rewards import accuracy, math

FOLDER = Path(__file__).parent / "golden"
DEFAULT = (FOLDER / "math_answers.jsonl", FOLDER / "math_answers_more.jsonl")
Row = Mapping[str, Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--golden")
    paths = [Path(given)] if given else DEFAULT
    rows = [(path.stem, number, row) for path in paths for number, row in enumerate(read(path), 1)]
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", [row for *_, row in rows], ids=[f"{stem}-{number}" for stem, number, _ in rows])
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", paths, ids=[path.stem for path in paths])


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


async def verdict(row: Row) -> float | None:
    [found] = await math(completions=[row["completion"]], solution=[row["solution"]])
    return found


async def test_math_gives_the_expected_verdict(row: Row) -> None:
    found = await verdict(row)
    words = row.get("trl_1_16") is None and row["expected"] is not None  # of a gold of plain words none will do
    assert found == row["expected"] or (words and found is None)


async def test_none_depends_on_the_gold_alone(row: Row) -> None:
    of_gold = [await verdict({**row, "completion": text}) is None for text in (r"\boxed{7}", "", r"\boxed{\frac{1}")]
    assert of_gold == [await verdict(row) is None] * 3


def test_accuracy_contradicts_no_row(row: Row) -> None:
    [found] = accuracy(completions=[row["completion"]], solution=[row["solution"]])
    assert found is None or found == row["expected"]
    if row["expected"] is None:
        assert found is None


def test_accuracy_decides_at_least_twenty_rows(path: Path) -> None:
    decided = [accuracy(completions=[r["completion"]], solution=[r["solution"]]) == [r["expected"]] for r in read(path)]
    assert sum(decided) >= min(20, len(decided) // 2)


@pytest.mark.parametrize("name", ["math_answers", "math_answers_more"])
def test_the_golden_files_hold_every_kind_of_verdict(name: str) -> None:
    expected = [row["expected"] for row in read(FOLDER / f"{name}.jsonl")]
    assert {0.0, 1.0, None} == set(expected)
    assert name == "math_answers" or len(expected) >= 120


@pytest.mark.parametrize(
    "open_brackets", ["(", "{", "\\frac{", "\\boxed{", "\\sqrt{", "^{", "5 a", "$", "\\text{", "a=", ","]
)
async def test_long_nonsense_is_wrong_at_once(open_brackets: str) -> None:
    """Nothing that a model writes takes the readers long, or deep."""
    for text in (
        open_brackets * 4_000,
        "(" * 400 + open_brackets + ")" * 400,
        open_brackets * 40 + "}" * 40,
        open_brackets * 300,
    ):
        assert accuracy(completions=["\\boxed{" + text + "}"], solution=["42"]) == [0.0]
        assert accuracy(completions=[text], solution=["42"]) == [0.0]
        assert accuracy(completions=["\\boxed{42}"], solution=[text]) in ([None], [0.0])
