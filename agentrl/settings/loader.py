"""Settings from TOML files and dotted overrides, each one checked. Unknown ones name the nearest."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, get_origin

import pydantic
import tomli_w

from agentrl.errors import ConfigError, UserError, suggest
from agentrl.settings import registry
from agentrl.settings.catalogue import CHOICES, describe_shared, list_unbounded
from agentrl.settings.documents import read_toml_table
from agentrl.settings.names.adoption import Adoption
from agentrl.settings.names.translation import find_name, list_hints
from agentrl.settings.schema import TrainConfig
from agentrl.settings.secret import check_no_credentials
from agentrl.settings.section import Section
from agentrl.settings.signature import build_arguments_model, is_plain, list_problems
from agentrl.settings.values import find_import_name

_SHORT = {"env": "name", "engine": "name", "players": "count"}  # tables that a single value stands for
Layer = tuple[str, Mapping[str, Any]]  # where the settings come from, for error messages; and the settings


def build_config(*layers: Layer) -> TrainConfig:
    """Merge layers, later ones win, and check them.

    Raises:
        ConfigError: in one sentence: the setting, what is wrong with it, the nearest known one, and where it stands.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    adoption = Adoption(is_known=is_setting, is_environments=partial(_is_environments, layers))
    for source, layer in layers:
        leaves = adoption.adopt(source, _flatten_layer(_with_names(layer)), flatten(merged))
        if "env.name" in leaves and _get(merged, "env.name") not in (None, leaves["env.name"]):
            del merged["env"]  # another environment: the first one's settings are not its own
        _drop_parameters(merged, leaves)
        for name, other in (("epochs", "steps"), ("steps", "epochs")):
            if name in leaves and other not in leaves:
                merged.pop(other, None)
        if "stages" in leaves and "steps" not in leaves:
            merged.pop("steps", None)
        for path, value in leaves.items():
            _check_known(path, source, leaves.get("env.name") or _get(merged, "env.name"))
            _set(merged, path, value, source)
            origin[path] = source
    adoption.tell()
    if "env" not in merged and (last := _get_last_env(merged.get("stages"))) is not None:
        merged["env"] = last
    if "env" not in merged:
        raise ConfigError("no environment; say --env NAME (agentrl list shows the names)")
    check_no_credentials(flatten(merged))
    try:
        return TrainConfig.model_validate(merged)
    except pydantic.ValidationError as error:
        raise ConfigError(_describe_problem(error, merged, origin)) from None


def _get_last_env(stages: Any) -> Any:
    """Return the environment of the last stage, on which a run of stages is evaluated where it names no other."""
    last = stages[-1] if isinstance(stages, list | tuple) and stages else None
    env = last.get("env") if isinstance(last, dict) else None
    return env if isinstance(env, str) or (isinstance(env, dict) and "name" in env) else None


def _describe_problem(error: pydantic.ValidationError, merged: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    """Say which setting is wrong, why, and where it stands. A sentence that begins with the setting stays as it is."""
    where, what = list_problems(error)[0]
    what = _plain(what)
    first = what.partition(" ")[0]
    if not where or first.startswith(f"{where}."):  # it is about several settings, or names its own
        return f"{what} [{_origin(origin, first)}]"
    return f"{where}: {what}{_shown(merged, where)} [{_origin(origin, where)}]"


def _drop_parameters(merged: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Drop the parameters of entries that a later layer replaces by another one."""
    for choice in CHOICES:
        path, section = f"{choice.section}.{choice.name}", merged.get(choice.section)
        if path in leaves and isinstance(section, dict) and section.get(choice.name) not in (None, leaves[path]):
            section.pop(choice.arguments, None)


def _get(settings: Mapping[str, Any], path: str) -> Any:
    value: Any = settings
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _set(settings: dict[str, Any], path: str, value: Any, source: str) -> None:
    *parents, last = path.split(".")
    for part in parents:
        settings = settings.setdefault(part, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: {part!r} was given a value of its own [{source}]")
    if value != {} or not isinstance(settings.get(last), dict):  # an empty table changes nothing in one that is there
        settings[last] = value


def _plain(what: str) -> str:
    return what.removeprefix("value error, ").removeprefix("Value error, ")


def _shown(merged: Mapping[str, Any], where: str) -> str:
    value = _get(merged, where)
    return "" if value is None or isinstance(value, Mapping) else f", not {value!r}"


def _origin(origin: Mapping[str, str], where: str) -> str:
    inside = [s for path, s in origin.items() if f"{path}.".startswith(f"{where}.") or where.startswith(f"{path}.")]
    return inside[-1] if inside else "default"


def read_toml(path: Path) -> Layer:
    """Read a file as a layer. Raises ConfigError if it is missing or no TOML."""
    try:
        return str(path), read_toml_table(path)
    except FileNotFoundError:
        raise ConfigError(f"no config file {str(path)!r}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def read_overrides(arguments: Sequence[str]) -> Layer:
    """Read ``--learner.lr 2e-6 --env=math-tools`` as a layer. Raises ConfigError for words of another form."""
    settings: dict[str, Any] = {}
    for path, text in split_options(arguments):
        set_option(settings, f"{path}.{_SHORT[path]}" if path in _SHORT else path, text, "command line")
    return "command line", settings


def split_options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each ``--name value`` or ``--name=value``, as typed.

    Raises:
        ConfigError: a word has no such form.
    """
    words = iter(arguments)
    for word in words:
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}; settings look like --learner.lr 1e-6")
        path, equals, text = word[2:].partition("=")
        if not equals and (text := next(words, "--")).startswith("--"):
            raise ConfigError(f"--{path} has no value")
        yield path, text


def set_option(settings: dict[str, Any], path: str, text: str, source: str, *, as_text: bool = False) -> None:
    """Put a value under its dotted name into nested settings.

    Args:
        text: a number, boolean, list or table as TOML writes it; anything else is text, dates too.
        source: where it was given, for error messages.
        as_text: take the value as it is.

    Raises:
        ConfigError: a part of ``path`` has a value of its own.
    """
    _set(settings, path, text if as_text else _read_value(text), source)


def _read_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, date | datetime | time) else value


def dump_toml(config: TrainConfig) -> str:
    """Format the config as TOML that `agentrl train` reads back; objects given in Python are named in a comment."""
    env = {k: v for k, v in config.env.items() if is_plain(v)}
    left_out = [f"env.{k}" for k, v in config.env.items() if k not in env and v is not None]
    left_out += [f"tools ({t!r:.60})" for t in config.tools if not isinstance(t, str) and find_import_name(t) is None]
    note = f"# given in Python, so not written here: {', '.join(left_out)}\n" if left_out else ""
    values = config.model_dump(mode="json", exclude_none=True, exclude={"env"})
    for section in dict.fromkeys(choice.section for choice in CHOICES):
        values[section] |= dict.fromkeys(list_unbounded(section, getattr(config, section)), "none")
    return note + tomli_w.dumps({"env": env, **values})


def _with_names(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expand ``env = "shop"``, ``engine = "transformers"`` and ``players = 2`` to tables."""
    kinds = {k: int if k == "players" else str for k in _SHORT}
    short = {k: {own: layer[k]} for k, own in _SHORT.items() if type(layer.get(k)) is kinds[k]}
    return {**layer, **short}


def _flatten_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a layer, but for the tables that are the value of another library's name, such as ``peft_config``."""
    whole = {name: value for name, value in layer.items() if isinstance(value, Mapping) and find_name(name)}
    return {**flatten({name: value for name, value in layer.items() if name not in whole}), **whole}


def _is_environments(layers: Sequence[Layer], name: str) -> bool:
    """Return True for a setting of the environment that the last layer names."""
    names = [env for _, layer in layers if (env := _get(_with_names(layer), "env.name"))]
    return bool(names) and name in _own_settings(names[-1])


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return tables in tables as one dict, by dotted names. An empty one in a table is a value: a set of tasks."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        is_table = isinstance(value, Mapping) and (value or not prefix)
        leaves |= flatten(value, f"{prefix}{name}.") if is_table else {f"{prefix}{name}": value}
    return leaves


@cache
def list_settings() -> Mapping[str, pydantic.fields.FieldInfo]:
    """List every setting by its dotted name, but those of environments, tools and entries.

    The default of a setting that is a parameter of entries is the one that the first of them declares.
    """
    found: dict[str, pydantic.fields.FieldInfo] = {}
    for name, field in TrainConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            own = describe_shared(name, field.annotation.model_fields)
            found |= {f"{name}.{n}": f for n, f in own.items()}
        else:
            found[name] = field
    return found


def _check_known(path: str, source: str, env: Any = None) -> None:
    if path.startswith(("env.", "tool.")):
        return  # the environment checks its own, and a tool
    if is_setting(path):
        return
    known = list_settings()
    if path in _own_settings(env):
        raise ConfigError(f"{path}: unknown setting; it is one of env {env!r}: --env.{path} [{source}]")
    last = path.rpartition(".")[2]
    hints = list_hints()
    alias = get_close_matches(last, hints, n=1, cutoff=0.85)
    longer = [k for k in known if "." in path and k.startswith(path)]  # rollout.tasks of rollout.tasks_per_step
    alike = longer or [k for k in known if k.rpartition(".")[2] == last]
    close = hints[alias[0]] if alias else next(iter(alike), None)
    hint = f"; did you mean {close!r}?" if close else suggest(path, known)
    hint = hint if "did you mean" in hint else "; agentrl train --help tells of them all"
    raise ConfigError(f"{path}: unknown setting{hint} [{source}]")


def is_setting(path: str) -> bool:
    """Return True for a setting of a run, or one within a table of settings."""
    known = list_settings()
    return path in known or any(path.startswith(f"{name}.") for name in known if _is_table(known[name]))


def _is_table(field: pydantic.fields.FieldInfo) -> bool:
    """Return True for a setting that holds settings of something else, which checks them."""
    return get_origin(field.annotation) is dict


def _own_settings(env: Any) -> Sequence[str]:
    """List the settings of an environment, by its name; none where it has no such name, or is not to be had."""
    try:
        cls, _ = registry.load_member("env", env) if isinstance(env, str) else (None, None)
        return [f.alias or "" for f in build_arguments_model(cls.__init__, env).model_fields.values()] if cls else []
    except UserError:  # that comes next
        return []
