"""Arguments drawn from a schema: such as conform are accepted, such as do not are answered by a refusal."""

from __future__ import annotations

import enum
import json
import random
from typing import Annotated, Literal

import pydantic
import pytest
from pydantic import Field

from agentrl import ToolError, tool
from agentrl.checks.argument_fuzzing import HUGE, draw_arguments, draw_wrong_arguments, extract_words


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tree(pydantic.BaseModel):
    name: str
    children: list[Tree] = []


@tool
async def everything(
    count: Annotated[int, Field(ge=2, le=9, multiple_of=3)],
    share: Annotated[float, Field(gt=0, lt=1)],
    word: Annotated[str, Field(min_length=3, max_length=5)],
    colour: Colour,
    tree: Tree,
    pairs: list[tuple[int, str]],
    counts: dict[str, int],
    sign: Literal[1, -1] = 1,
    maybe: int | None = None,
    items: Annotated[list[bool], Field(min_length=1, max_length=2)] = [True],  # noqa: B006
    below: Annotated[int, Field(lt=0)] = -1,
) -> str:
    """Take everything."""
    return "taken"


def test_what_conforms_is_accepted() -> None:
    rng = random.Random(0)
    seen = [draw_arguments(everything.parameters, rng, ["one", "two"]) for _ in range(300)]
    for arguments in seen:
        everything.check(json.loads(json.dumps(arguments)))
    assert {a["colour"] for a in seen} == {"red", "blue"}
    assert {"maybe" in a for a in seen} == {True, False}
    assert any(a["tree"].get("children") for a in seen)


def test_the_same_dice_draw_the_same() -> None:
    one, other = (draw_arguments(everything.parameters, random.Random(5)) for _ in range(2))
    assert one == other


def test_what_does_not_conform_is_refused_or_at_least_odd() -> None:
    given = list(draw_wrong_arguments(everything.parameters, random.Random(0)))
    assert {} in given
    refused = 0
    for arguments in given:
        try:
            everything.check(arguments)
        except ToolError:
            refused += 1
    assert refused > len(given) * 0.8
    assert any(a.get("word") == "x" * HUGE for a in given)


def test_examples_of_a_description_are_used() -> None:
    schema = {
        "type": "object",
        "properties": {"q": {"type": "string", "description": 'such as "(12+7)*3".'}},
        "required": ["q"],
    }
    rng = random.Random(0)
    assert "(12+7)*3" in {draw_arguments(schema, rng)["q"] for _ in range(30)}


@pytest.mark.parametrize(("text", "words"), [("a lamp, 3.5", ["a", "lamp", "3.5"]), ("", [])])
def test_words(text: str, words: list[str]) -> None:
    assert extract_words(text) == words
