"""A function's signature as a pydantic model, which checks a tool's arguments and an environment's settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import docstring_parser
import pydantic

from agentrl.errors import ConfigError, ContractError, suggest


def build_arguments_model(
    function: Callable[..., Any], what: str, *, described: bool = False, keyword_only: bool = False
) -> type[pydantic.BaseModel]:
    """Build a pydantic model with one field a parameter, ``self`` left out; unknown arguments are refused.

    Args:
        what: how a sentence calls the function, such as ``tool 'search'``.
        described: take each parameter's description from the docstring (Google, NumPy or reST style).
        keyword_only: leave all out but keyword-only parameters; types of others need not be importable.

    Raises:
        ContractError: a parameter has no type or an unknown one, or is ``*args``, ``**kwargs`` or positional-only.
    """
    inner, bound = _unwrap(function)
    try:
        hints = _read_hints(inner, keyword_only)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, SyntaxError, AttributeError, TypeError) as error:
        raise ContractError(f"{what}: a type in its signature cannot be found: {error}") from None
    except ValueError:
        raise ContractError(f"{what} is written in C and has no signature; write a def with types around it") from None
    source = inner if inspect.isroutine(inner) or isinstance(inner, type) else _find_signature_source(inner)
    doc = docstring_parser.parse(inspect.getdoc(source) or "") if described else None
    descriptions = {p.arg_name: p.description for p in doc.params} if doc else {}
    fields: dict[str, Any] = {}
    for parameter in parameters:
        name = parameter.name
        if name == "self" or name in bound:
            continue
        if keyword_only and parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
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


def _unwrap(function: Callable[..., Any]) -> tuple[Callable[..., Any], frozenset[str]]:
    """Return the function in a ``partial``, and the arguments that it binds by name, which nobody else gives."""
    if not isinstance(function, partial):
        return function, frozenset()
    inner, bound = _unwrap(function.func)
    return inner, bound | function.keywords.keys()


def _read_hints(function: Callable[..., Any], keyword_only: bool) -> dict[str, Any]:
    """Resolve the types of a signature, or those of its keyword-only part."""
    if not keyword_only:
        return get_type_hints(function, include_extras=True)
    source: Any = function if inspect.isroutine(function) else _find_signature_source(function)
    kinds = inspect.signature(function).parameters
    types = getattr(source, "__annotations__", {})
    holder = SimpleNamespace(
        __annotations__={n: t for n, t in types.items() if n in kinds and kinds[n].kind == kinds[n].KEYWORD_ONLY}
    )
    return get_type_hints(holder, getattr(inspect.unwrap(source), "__globals__", {}), include_extras=True)


def _find_signature_source(thing: Any) -> Any:
    """Return the function whose signature a class, or an object that can be called, has."""
    return getattr(thing, "__init__") if isinstance(thing, type) else type(thing).__call__  # noqa: B009


def convert_arguments(model: type[pydantic.BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments to their types, by name. Raises pydantic.ValidationError."""
    values = model.model_validate(dict(arguments))
    return {field.alias or name: getattr(values, name) for name, field in model.model_fields.items()}


def convert_value(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to a type. Raises ConfigError where it is no such value; ``name`` is how the user gave it."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(refuse_bool(value, kind))
    except pydantic.ValidationError as error:
        raise ConfigError(f"{name}: {list_problems(error)[0][1]}, not {value!r:.80}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}, not {value!r:.80}") from None


def refuse_bool(value: Any, annotation: Any) -> Any:
    """Return a value. Raises ValueError where it is true or false, and the annotation wants a number and no switch."""
    kinds = set(_kinds(annotation))
    if isinstance(value, bool) and not kinds & {bool, Any} and (number := kinds & {int, float}):
        raise ValueError(f"input should be a valid {'integer' if int in number else 'number'}")
    return value


def _kinds(annotation: Any) -> Sequence[Any]:
    """List the types of a union, and of what is annotated."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return (annotation,)


def list_problems(error: pydantic.ValidationError) -> list[tuple[str, str]]:
    """List what is wrong, as (where, what) with dots between the parts of where."""
    errors = ((e["loc"], e["msg"].removeprefix("Value error, ")) for e in error.errors())
    return [(".".join(map(str, where)), what[:1].lower() + what[1:]) for where, what in errors]


def convert_settings(
    cls: Any, settings: Mapping[str, Any], what: str, section: str, family: tuple[str, str | None] = ("", None)
) -> dict[str, Any]:
    """Convert settings to the types of ``cls.__init__``; ``a,b`` is a list where the type is one.

    Args:
        what: how a sentence calls it, such as ``env 'shop'``.
        section: what stands before a setting's name: ``env`` where it is given as ``--env.level``.
        family: its name, and the setting that ``NAME:VALUE`` gives, if any.

    Raises:
        ContractError: a setting is unknown, missing or wrong.
    """
    values = convert_parameters(build_arguments_model(cls.__init__, what), settings, what, section, family)
    return {name: values[name] for name in settings}


def convert_parameters(
    model: type[pydantic.BaseModel],
    settings: Mapping[str, Any],
    what: str,
    section: str,
    family: tuple[str, str | None] = ("", None),
    paths: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Convert settings to the types of a model of arguments, and add the defaults of the others.

    Args:
        what, section, family: as in `convert_settings`.
        paths: how the user calls a setting, where that is not ``section.NAME``.

    Raises:
        ContractError: a setting is unknown, missing or wrong.
    """
    known = {f.alias or "": f.annotation for f in model.model_fields.values()}
    named = {name: f"{section}.{name}" for name in (*known, *settings)} | dict(paths or {})
    for name in settings:
        if name not in known:
            raise ContractError(f"{what} has no setting '{named[name]}'{suggest(name, known)}")
        try:
            refuse_bool(settings[name], known[name])
        except ValueError as error:
            raise ContractError(f"{named[name]} of {what}: {error}, not {settings[name]!r}") from None
    try:
        return convert_arguments(model, _listed(settings, known))
    except pydantic.ValidationError as error:
        where, wrong = list_problems(error)[0]
        name, _, deeper = where.partition(".")
        path = named[name] + f".{deeper}" * bool(deeper)
        if wrong == "field required":
            family_name, named_by = family
            value = f"value for --{path}{_in_python(section, where)}"
            form = f"name: {family_name}:{where.upper()}" if where == named_by else value
            raise ContractError(f"{what} needs a {form}") from None
        raise ContractError(f"{path} of {what}: {wrong}, not {settings[name]!r:.200}") from None


def _in_python(section: str, name: str) -> str:
    return f" (in Python: env_args={{{name!r}: ...}})" if section == "env" else ""


def _listed(settings: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: [part.strip() for part in v.split(",")] if isinstance(v, str) and _is_list(types[k]) else v
        for k, v in settings.items()
    }


def _is_list(annotation: Any) -> bool:
    kinds = _kinds(annotation)
    return any((get_origin(k) or k) in (list, tuple, Sequence) for k in kinds) and str not in kinds


def is_plain(value: Any, tables: bool = False) -> bool:
    """Return True if TOML holds it. Tables in a list are rows of a dataset, unless they are in a table of settings."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and is_plain(v, tables=True) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(v, tables) and (tables or not isinstance(v, Mapping)) for v in value)
    return isinstance(value, str | int | float | bool)
