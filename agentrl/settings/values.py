"""The types of settings' values: lists with commas between them, objects by their names, names of entries."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BeforeValidator

from agentrl.errors import UserError
from agentrl.settings.registry import EntryKind, check_name
from agentrl.settings.signature import is_plain


def split_commas(value: Any) -> Any:
    """Return a text as a list, split at its commas; anything else as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


LISTED = BeforeValidator(split_commas)
CommaSeparated = Annotated[tuple[str, ...], LISTED]  # on the command line with commas between them


def _list_objects(given: object) -> Sequence[object]:
    """Return a list of what a user gives: names with commas between them, one function, or a list."""
    given = split_commas(given)
    return given if isinstance(given, list | tuple) else [given]


def find_import_name(thing: object, *, main: bool = False) -> str | None:
    """Return ``module:name`` where that imports the thing; None for what is made in a function.

    Args:
        main: of a script or a notebook too, whose ``__main__`` another process does not have.
    """
    own = getattr(thing, "function", thing)
    module, name = getattr(own, "__module__", None), getattr(own, "__qualname__", "<none>")
    if module is None or (module == "__main__" and not main) or "<" in name:
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
NamedObjects = Annotated[tuple[Any, ...], BeforeValidator(_list_objects), pydantic.PlainSerializer(_name_objects)]


def _check_plain(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse what config.toml, which a run resumes from, cannot hold."""
    for name, value in values.items():
        if not is_plain({name: value}):
            raise ValueError(
                f"{name}: {value!r:.80} cannot be written to config.toml; text, numbers, lists, tables can"
            )
    return values


Parameters = Annotated[dict[str, Any], AfterValidator(_check_plain)]


def _read_rules(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a turn must match as texts, a schema as JSON. Raises ValueError: it is not ``regex`` or ``json``."""
    if not rules:
        return {}
    if len(rules) != 1 or not rules.keys() <= {"regex", "json"}:
        raise ValueError(f"takes regex or json, one of them, not {' and '.join(rules)}")
    ((kind, rule),) = rules.items()
    if kind == "regex":
        if not isinstance(rule, str) or not rule:
            raise ValueError(f"regex: a text, not {rule!r:.80}; on the command line in quotes of its own: '\"12\"'")
        return {kind: rule}
    try:
        schema = json.loads(rule) if isinstance(rule, str) else rule
    except ValueError as error:
        raise ValueError(f"json: a schema in JSON; {error}, in {rule!r:.80}") from None
    if not isinstance(schema, Mapping):
        raise ValueError(f"json: a schema, which is a table, not {rule!r:.80}")
    return {kind: json.dumps(schema)}


StructuredOutputs = Annotated[dict[str, Any], AfterValidator(_read_rules)]


def _check_named(kind: EntryKind, given: object) -> object:
    """Return the name of an entry, ``module:function`` of a function; anything else as it is. Raises ValueError."""
    if isinstance(given, str):
        try:
            return check_name(kind, given)
        except UserError as error:
            raise ValueError(str(error)) from None
    if not callable(given):
        return given
    name = find_import_name(given, main=True)
    if name is None:
        raise ValueError("input should be a name, or a function defined at the top of a module, a script or a notebook")
    return name


def _entry_name(kind: EntryKind) -> BeforeValidator:
    """Return the check of a setting that names an entry; in Python it may be the function itself."""
    return BeforeValidator(partial(_check_named, kind))


LossName = Annotated[str, _entry_name("loss")]
AdvantageName = Annotated[str, _entry_name("advantage")]
ImportanceSamplingName = Annotated[str, _entry_name("importance_sampling")]
OptimizerName = Annotated[str, _entry_name("optimizer")]
SamplerName = Annotated[str, _entry_name("sampler")]
CallFormatName = Annotated[str, _entry_name("call_format")]
ContextName = Annotated[str, _entry_name("context")]
PlayerLauncherName = Annotated[str, _entry_name("player_launcher")]
RunLauncherName = Annotated[str, _entry_name("run_launcher")]
EngineName = Annotated[str, _entry_name("engine")]
