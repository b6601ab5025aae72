"""Settings read and written: a TOML file, then dotted overrides, each one checked. Unknown ones name the nearest."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pydantic
import tomli_w

from agentrl.config import Section, TrainConfig
from agentrl.errors import ConfigError, nearest
from agentrl.signature import problems

Layer = tuple[str, Mapping[str, Any]]  # where the settings come from, for error messages; and the settings


def build(*layers: Layer) -> TrainConfig:
    """Merge layers, later ones win, and check them.

    Raises:
        ConfigError: in one sentence: the setting, what is wrong with it, the nearest known one, and where it stands.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, layer in layers:
        leaves = flatten(_with_names(layer))
        if "env.name" in leaves and _get(merged, "env.name") not in (None, leaves["env.name"]):
            del merged["env"]  # another environment: the first one's settings are not its own
        for path, value in leaves.items():
            _check_known(path, source)
            _set(merged, path, value, source)
            origin[path] = source
    if "env" not in merged:
        raise ConfigError("no environment; say --env NAME (agentrl list shows the names)")
    try:
        return TrainConfig.model_validate(merged)
    except pydantic.ValidationError as error:
        where, what = problems(error)[0]
        raise ConfigError(f"{where}: {_plain(what)}{_shown(merged, where)} [{_origin(origin, where)}]") from None


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
    """A layer from a file. Raises ConfigError where it is missing or no TOML."""
    try:
        return str(path), tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def read_overrides(arguments: Sequence[str]) -> Layer:
    """A layer from ``--learner.lr 2e-6 --env=math-tools``. Raises ConfigError for what has no such form."""
    settings: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}; settings look like --learner.lr 1e-6")
        path, given, text = word[2:].partition("=")
        if not given and ((text := next(words, "")) == "" or text.startswith("--")):
            raise ConfigError(f"--{path} has no value")
        if path == "engine":
            path = "engine.name"
        _set(settings, "env.name" if path == "env" else path, _literal(text), "command line")
    return "command line", settings


def _literal(text: str) -> Any:
    """A number, boolean, list or table as TOML writes it; anything else is text, dates too."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, date | datetime | time) else value


def dump_toml(config: TrainConfig) -> str:
    """The config as a TOML file that `agentrl train` reads back; objects given in Python are named in a comment."""
    env = {k: v for k, v in config.env.items() if _is_plain(v)}
    left_out = [f"env.{k}" for k, v in config.env.items() if k not in env and v is not None]
    note = f"# given in Python, so not written here: {', '.join(left_out)}\n" if left_out else ""
    return note + tomli_w.dumps({"env": env, **config.model_dump(mode="json", exclude_none=True, exclude={"env"})})


def _is_plain(value: Any, tables: bool = False) -> bool:
    """Whether TOML holds it. Tables in a list are rows of a dataset, unless they are within a table of settings."""
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v, tables=True) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(v, tables) and (tables or not isinstance(v, Mapping)) for v in value)
    return isinstance(value, str | int | float | bool)


def _with_names(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """``env = "shop"`` and ``engine = "transformers"`` are short for a table with a name."""
    short = {k: {"name": layer[k]} for k in ("env", "engine") if isinstance(layer.get(k), str)}
    return {**layer, **short}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return tables in tables as one dict, by dotted names."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        leaves |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def known_settings() -> dict[str, pydantic.fields.FieldInfo]:
    """Every setting by its dotted name, but the environments' own."""
    found: dict[str, pydantic.fields.FieldInfo] = {}
    for name, field in TrainConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found |= {f"{name}.{n}": f for n, f in field.annotation.model_fields.items()}
        else:
            found[name] = field
    return found


def _check_known(path: str, source: str) -> None:
    if path.startswith(("env.", "tool.")):
        return  # the environment checks its own, and a tool
    known = known_settings()
    if path in known:
        return
    last = path.rpartition(".")[2]
    alias = get_close_matches(last, _ALIASES, n=1, cutoff=0.85)
    close = _ALIASES[alias[0]] if alias else next((k for k in known if k.rpartition(".")[2] == last), None)
    hint = f"; did you mean {close!r}?" if close else nearest(path, known)
    hint = hint if "did you mean" in hint else "; agentrl train --help tells of them all"
    raise ConfigError(f"{path}: unknown setting{hint} [{source}]")


# What users of TRL type first.
_ALIASES = {
    "learning_rate": "learner.lr",
    "max_steps": "steps",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_turn_tokens",
    "per_device_train_batch_size": "rollout.tasks",
    "output_dir": "run.dir",
    "optim": "learner.optimizer",
    "loss_type": "learner.loss",
    "lr_scheduler_type": "learner.schedule",
    "model_name_or_path": "model",
}
