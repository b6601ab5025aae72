"""The types of settings' values: lists with commas between them, objects by their names, names of entries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator

from agentrl.errors import UserError
from agentrl.settings.registry import EntryKind, check_name


def split_commas(value: Any) -> Any:
    """Return a text as a list, split at its commas; anything else as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


LISTED = pydantic.BeforeValidator(split_commas)
CommaSeparated = Annotated[tuple[str, ...], LISTED]  # on the command line with commas between them


def _list_objects(given: object) -> Sequence[object]:
    """Return a list of what a user gives: names with commas between them, one function, or a list."""
    given = split_commas(given)
    return given if isinstance(given, list | tuple) else [given]


def find_import_name(thing: object) -> str | None:
    """Return ``module:name`` where that imports the thing; None for what is made in a script or in a function."""
    own = getattr(thing, "function", thing)
    module, name = getattr(own, "__module__", None), getattr(own, "__qualname__", "<none>")
    if module in (None, "__main__") or "<" in name:
        return None
    value: object = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is thing else None


def _name_objects(objects: Sequence[object]) -> list[str]:
    """List the objects that another process can load, by name; the others are this one's."""
    names = (o if isinstance(o, str) else find_import_name(o) for o in objects)
    return [name for name in names if name is not None]


# On the command line names with commas between them; in Python the objects too, which are checked where they are used.
NamedObjects = Annotated[
    tuple[Any, ...], pydantic.BeforeValidator(_list_objects), pydantic.PlainSerializer(_name_objects)
]
Parameters = dict[str, Any]


def _named(kind: EntryKind, name: str) -> str:
    try:
        return check_name(kind, name)
    except UserError as error:
        raise ValueError(str(error)) from None


LossName = Annotated[str, AfterValidator(partial(_named, "loss"))]
AdvantageName = Annotated[str, AfterValidator(partial(_named, "advantage"))]
ImportanceSamplingName = Annotated[str, AfterValidator(partial(_named, "importance_sampling"))]
OptimizerName = Annotated[str, AfterValidator(partial(_named, "optimizer"))]
SamplerName = Annotated[str, AfterValidator(partial(_named, "sampler"))]
CallFormatName = Annotated[str, AfterValidator(partial(_named, "call_format"))]
EngineName = Annotated[str, AfterValidator(partial(_named, "engine"))]
