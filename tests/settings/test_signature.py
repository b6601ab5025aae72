"""A signature as a model: what is checked, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pydantic
import pytest

from agentrl import ContractError
from agentrl.settings.signature import build_arguments_model, convert_arguments, list_problems


def fit(
    city: str, count: int = 3, kind: Literal["a", "b"] = "a", *, schema: bool = False, _hidden: float = 0.5
) -> None:
    """Fit.

    Args:
        city: the city's name.
        schema: a word that pydantic wants for itself.
    """


def test_arguments_come_back_converted_and_with_defaults() -> None:
    model = build_arguments_model(fit, "tool 'fit'")
    assert convert_arguments(model, {"city": "Rome", "count": "4", "schema": True, "_hidden": 1}) == {
        "city": "Rome",
        "count": 4,
        "kind": "a",
        "schema": True,
        "_hidden": 1.0,
    }


@pytest.mark.parametrize(
    ("arguments", "where", "what"),
    [
        ({}, "city", "required"),
        ({"city": 3}, "city", "valid string"),
        ({"city": "x", "count": "many"}, "count", "valid integer"),
        ({"city": "x", "kind": "c"}, "kind", "'a' or 'b'"),
        ({"city": "x", "town": "y"}, "town", "not permitted"),
        ({"city": "x", "arg_city": "y"}, "arg_city", "not permitted"),
    ],
)
def test_what_is_wrong_is_said_with_the_arguments_own_name(arguments: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        convert_arguments(build_arguments_model(fit, "tool 'fit'"), arguments)
    (found,) = list_problems(raised.value)
    assert found[0] == where
    assert what in found[1]
    assert found[1][0].islower()


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        convert_arguments(build_arguments_model(fit, "tool 'fit'"), {"count": "x", "kind": 1})
    assert [where for where, _ in list_problems(raised.value)] == ["city", "count", "kind"]


def test_descriptions_come_from_the_docstring_if_asked() -> None:
    properties = build_arguments_model(fit, "", described=True).model_json_schema()["properties"]
    assert properties["city"]["description"] == "the city's name."
    assert "description" not in properties["count"]
    assert "description" not in build_arguments_model(fit, "").model_json_schema()["properties"]["city"]


def untyped(city) -> None: ...  # type: ignore[no-untyped-def]
def starred(*cities: str) -> None: ...
def keyworded(**cities: str) -> None: ...
def positional(city: str, /) -> None: ...
def unknown(city: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (untyped, "argument 'city' of tool 'f' has no type; write `city: str`, say"),
        (starred, "tool 'f' takes [*]cities: 'str'; name each argument, with its type"),
        (keyworded, r"tool 'f' takes \*\*cities: .*; name each argument, with its type"),
        (positional, "argument 'city' of tool 'f' cannot be given by name; take the `/` out"),
        (unknown, "tool 'f': a type in its signature cannot be found: name 'Nowhere' is not defined"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_a_sentence(function: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        build_arguments_model(function, "tool 'f'")
