"""A function's signature as a pydantic model: what a tool's arguments and an environment's settings are checked by."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import docstring_parser
import pydantic

from agentrl.errors import ConfigError, ContractError, nearest


def arguments_model(function: Callable[..., Any], what: str, *, described: bool = False) -> type[pydantic.BaseModel]:
    """A model with one field a parameter, ``self`` left out; unknown arguments are refused.

    Args:
        what: how a sentence calls the function, such as ``tool 'search'``.
        described: take each parameter's description from the docstring (Google, NumPy or reST style).

    Raises:
        ContractError: a parameter has no type or an unknown one, or is ``*args``, ``**kwargs`` or positional-only.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ContractError(f"{what}: a type in its signature cannot be found: {error}") from None
    doc = docstring_parser.parse(inspect.getdoc(function) or "") if described else None
    descriptions = {p.arg_name: p.description for p in doc.params} if doc else {}
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ContractError(f"{what} takes {parameter}; name each argument, with its type")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ContractError(f"argument {name!r} of {what} cannot be given by name; take the `/` out")
        if name not in hints:
            raise ContractError(f"argument {name!r} of {what} has no type; write `{name}: str`, say")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Under an alias, so that a parameter may be called `schema` or `copy`, or begin with an underscore.
        info = pydantic.Field(default, alias=name, description=descriptions.get(name))
        fields[f"arg_{name}"] = (hints[name], info)
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return pydantic.create_model("arguments", __config__=config, **fields)


def checked(model: type[pydantic.BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments converted to their types, by name. Raises pydantic.ValidationError."""
    values = model.model_validate(dict(arguments))
    return {field.alias or name: getattr(values, name) for name, field in model.model_fields.items()}


def checked_argument(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to a type. Raises ConfigError where it is no such value; ``name`` is how the user gave it."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{name}: {problems(error)[0][1]}, not {value!r:.80}") from None


def problems(error: pydantic.ValidationError) -> list[tuple[str, str]]:
    """What is wrong, as (where, what) with dots between the parts of where."""
    return [(".".join(str(p) for p in e["loc"]), e["msg"][:1].lower() + e["msg"][1:]) for e in error.errors()]


def settings_of(
    cls: Any, given: Mapping[str, Any], what: str, section: str, family: tuple[str, str | None] = ("", None)
) -> dict[str, Any]:
    """The settings given, converted to the types of ``cls.__init__``; ``a,b`` is a list where one is wanted.

    Args:
        what: how a sentence calls it, such as ``env 'shop'``.
        section: what stands before a setting's name: ``env`` where it is given as ``--env.level``.
        family: its name, and the setting that ``NAME:VALUE`` gives, if any.

    Raises:
        ContractError: a setting is unknown, missing or wrong.
    """
    model = arguments_model(cls.__init__, what)
    known = {f.alias or "": f.annotation for f in model.model_fields.values()}
    for name in given:
        if name not in known:
            raise ContractError(f"{what} has no setting '{section}.{name}'{nearest(name, known)}")
    try:
        values = checked(model, _listed(given, known))
    except pydantic.ValidationError as error:
        where, wrong = problems(error)[0]
        if wrong == "field required":
            name, named_by = family
            form = f"name: {name}:{where.upper()}" if where == named_by else f"value for --{section}.{where}"
            raise ContractError(f"{what} needs a {form}") from None
        value = given[where.partition(".")[0]]
        raise ContractError(f"{section}.{where} of {what}: {wrong}, not {value!r}") from None
    return {name: values[name] for name in given}


def _listed(settings: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: [part.strip() for part in v.split(",")] if isinstance(v, str) and _is_list(types[k]) else v
        for k, v in settings.items()
    }


def _is_list(annotation: Any) -> bool:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any((get_origin(k) or k) in (list, tuple, Sequence) for k in kinds) and str not in kinds
