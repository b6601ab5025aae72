"""A JSON schema as the check of a tool's arguments, in words for the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import referencing.exceptions
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from agentrl.errors import UserError
from agentrl.tools.tool import ArgumentCheck
from agentrl.types import JsonSchema

MAX_CHARS = 200  # of what is wrong with one argument: jsonschema repeats the value


def build_argument_check(schema: JsonSchema, what: str) -> ArgumentCheck:
    """Build the check of arguments by a schema. Raises UserError, which begins with ``what``, if it is no schema."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))  # patterns are of any language
    except jsonschema.SchemaError as error:
        raise UserError(f"{what}: its schema is no JSON schema: {error.message:.{MAX_CHARS}}") from None
    validator: Validator = kind(schema, registry=Registry())  # which fetches nothing

    def check(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        try:
            found = list(validator.iter_errors(dict(arguments)))
        except (referencing.exceptions.Unresolvable, re.error):
            return []  # a reference to elsewhere, or a pattern of another language: the server has the last word
        return list(dict.fromkeys(words for error in found for words in _words(error)))

    return check


def _words(error: jsonschema.ValidationError) -> Iterator[tuple[str, str]]:
    path = [str(p) for p in error.absolute_path]
    if error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                yield ".".join([*path, name]), "field required"
    elif error.validator == "additionalProperties" and error.validator_value is False:
        known = error.schema.get("properties", {})
        for name in error.instance:
            if name not in known:
                yield ".".join([*path, name]), f"not an argument; known: {', '.join(known) or 'none'}"
    else:
        yield ".".join(path) or "arguments", f"{error.message:.{MAX_CHARS}}"
