"""The scope of an evaluation: its tasks and trials, and the settings that it heeds."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
import tomli_w

from agentrl.errors import ConfigError, UserError, nearest
from agentrl.folder import put
from agentrl.layers import known_settings
from agentrl.measurement import Trials
from agentrl.signature import problems

FILE = "evaluation.toml"
SPLITS = ("test", "train")
EPISODES = ("temperature", "max_turns", "max_turn_tokens", "turn_timeout_s", "episode_timeout_s")
AT_ENDPOINT = (  # settings that an evaluation heeds where a server renders and samples by itself
    *("env", "tools", "tool", "model", "seed", "eval.trials", "eval.pass_at", "engine.capacity"),
    *(f"rollout.{name}" for name in EPISODES),
)
ACTING = (
    *AT_ENDPOINT,
    *("dtype", "chat_template", "deterministic", "lora.quantize"),
    *("engine.name", "engine.max_context", "engine.threads", "engine.urls"),
)
INSTEAD = {
    "rollout.group_size": "trials",
    "rollout.tasks": "tasks",
    "eval.tasks": "tasks",
    "eval.final_tasks": "tasks",
    "run.dir": "out",
    "run.resume": "resume",
}


class Scope(NamedTuple):
    """The scope of an evaluation: ``tasks`` tasks of a split, ``sampled`` trials of each, and a greedy one."""

    split: str = "test"
    first: Annotated[int, pydantic.Field(ge=0)] = 0
    tasks: Annotated[int, pydantic.Field(ge=1)] = 256
    sampled: Annotated[int, pydantic.Field(ge=0)] = 1
    greedy: bool = True
    endpoint: str = ""  # a server's URL, where one is asked
    policy: str = ""  # by what it is known again, once it is loaded

    @property
    def trials(self) -> Trials:
        return Trials(self.sampled, self.greedy)


def checked_scope(**given: Any) -> Scope:
    """Make a scope of values of any type. Raises ConfigError: one is wrong."""
    try:
        return pydantic.TypeAdapter(Scope).validate_python(given)
    except pydantic.ValidationError as error:
        name, what = problems(error)[0]
        raise ConfigError(f"{name}: {what}, not {given.get(name)!r:.80}") from None


def read_scope(path: Path) -> Scope | None:
    """Read what a folder evaluates; None where it holds no evaluation. Raises UserError: it cannot be read."""
    try:
        found = tomllib.loads((path / FILE).read_text("utf-8"))
        if odd := sorted(found.keys() ^ set(Scope._fields)):
            raise ValueError(f"{odd[0]} is {'unknown' if odd[0] in found else 'missing'}: another version wrote it")
        return checked_scope(**found)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise UserError(f"{path / FILE} cannot be read: {error}") from None


def write_scope(path: Path, scope: Scope) -> None:
    """Write what a folder evaluates."""
    with put(path / FILE) as aside:
        aside.write_text(tomli_w.dumps(scope._asdict()), "utf-8")


def heeds(scope: Scope, name: str) -> bool:
    """Return True if an evaluation heeds a setting."""
    heeded = AT_ENDPOINT if scope.endpoint else ACTING
    return name in heeded or name.partition(".")[0] in heeded


def check_heeded(names: Sequence[str], scope: Scope, option: Callable[[str], str] = str) -> None:
    """Refuse a setting that would do nothing, by a ConfigError; ``option`` writes a name as the user does."""
    for name in names:
        if heeds(scope, name) or name not in known_settings():
            continue
        if name in ACTING:
            raise ConfigError(f"{option(name)} does nothing with an endpoint: its server renders and samples by itself")
        instead = f"; here it is {option(INSTEAD[name])}" if name in INSTEAD else ""
        raise ConfigError(f"{option(name)} does nothing in an evaluation, which updates no policy{instead}")


def check_split(split: Any, option: str = "split") -> None:
    """Refuse a split that there is not, by a ConfigError."""
    if split not in SPLITS:
        raise ConfigError(f"{option} is train or test, not {split!r}{nearest(str(split), SPLITS)}")
