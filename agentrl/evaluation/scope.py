"""The scope of an evaluation: its tasks and trials, and the settings that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
import tomli_w

from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError, suggest
from agentrl.evaluation.measurement import Trials
from agentrl.runs.atomic import replace_atomically
from agentrl.settings.documents import read_toml_table
from agentrl.settings.loader import list_settings
from agentrl.settings.signature import convert_value, list_problems

FILE = "evaluation.toml"
EPISODES = ("temperature", "top_p", "stop", "max_turns", "max_tokens", "turn_timeout_s", "episode_timeout_s")
TOKENS = (  # of an engine of ours
    *("top_k", "min_p", "repetition_penalty", "structured_outputs", "max_episode_tokens"),
    *("context", "context_budget", "summary_tokens"),
)
AT_ENDPOINT = (  # settings that an evaluation uses where a server renders and samples by itself
    *("env", "tools", "tool", "model", "template", "seed", "eval.trials", "eval.pass_at", "engine.max_num_seqs"),
    *(f"rollout.{name}" for name in EPISODES),
)
ACTING = (
    *AT_ENDPOINT,
    *("players", "dtype", "load", "chat_template", "call_format", "deterministic", "lora.quantize"),
    *(f"rollout.{name}" for name in TOKENS),
    *(
        "agent",
        "agent_workers",
        "agent_sandbox",
        "agent_readable",
        "engine.name",
        "engine.max_model_len",
        "engine.threads",
        "engine.urls",
    ),
)
INSTEAD = {
    "rollout.group_size": "trials",
    "rollout.tasks_per_step": "tasks",
    "eval.tasks": "tasks",
    "eval.final_tasks": "tasks",
    "run.dir": "out",
    "run.resume": "resume",
}


class EvaluationScope(NamedTuple):
    """The scope of an evaluation: ``tasks`` tasks of a split, ``sampled`` trials of each, and a greedy one."""

    split: str = "test"
    first: Annotated[int, pydantic.Field(ge=0)] = 0
    tasks: Annotated[int, pydantic.Field(ge=1)] = 256
    sampled: Annotated[int, pydantic.Field(ge=0)] = 1
    greedy: bool = True
    endpoint: str = ""  # a server's URL, where one is asked
    policy: str = ""  # its identity, once it is loaded

    @property
    def trials(self) -> Trials:
        return Trials(self.sampled, self.greedy)


def build_scope(**values: Any) -> EvaluationScope:
    """Build a scope from values of any type. Raises ConfigError: one is wrong."""
    for name in ("first", "tasks", "sampled"):
        convert_value(name, values.get(name, 1), int)
    try:
        return pydantic.TypeAdapter(EvaluationScope).validate_python(values)
    except pydantic.ValidationError as error:
        name, what = list_problems(error)[0]
        raise ConfigError(f"{name}: {what}, not {values.get(name)!r:.80}") from None


def read_scope(path: Path) -> EvaluationScope | None:
    """Read the scope of a folder; None if it holds no evaluation. Raises UserError: it cannot be read."""
    try:
        values = read_toml_table(path / FILE)
        if odd := sorted(values.keys() ^ set(EvaluationScope._fields)):
            raise ValueError(f"{odd[0]} is {'unknown' if odd[0] in values else 'missing'}: another version wrote it")
        return build_scope(**values)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise UserError(f"{path / FILE} cannot be read: {error}") from None


def write_scope(path: Path, scope: EvaluationScope) -> None:
    """Write the scope of a folder."""
    with replace_atomically(path / FILE) as aside:
        aside.write_text(tomli_w.dumps(scope._asdict()), "utf-8")


def is_setting_used(scope: EvaluationScope, name: str) -> bool:
    """Return True if an evaluation uses a setting."""
    used = AT_ENDPOINT if scope.endpoint else ACTING
    return name in used or name.partition(".")[0] in used


def check_settings_used(names: Sequence[str], scope: EvaluationScope, option: Callable[[str], str] = str) -> None:
    """Refuse a setting that would do nothing, by a ConfigError; ``option`` writes a name as the user does."""
    for name in names:
        if is_setting_used(scope, name) or name not in list_settings():
            continue
        if name in ACTING:
            raise ConfigError(f"{option(name)} does nothing with an endpoint: its server renders and samples by itself")
        instead = f"; here it is {option(INSTEAD[name])}" if name in INSTEAD else ""
        raise ConfigError(f"{option(name)} does nothing in an evaluation, which updates no policy{instead}")


def check_split(spec: EnvSpec, split: object, option: str = "split") -> None:
    """Refuse a split that the environment does not have, by a ConfigError."""
    splits = spec.list_splits()
    if split not in splits:
        words = ", ".join(splits[:-1]) + f" or {splits[-1]}"
        raise ConfigError(f"{option} is {words}, not {split!r}{suggest(str(split), splits)}")
