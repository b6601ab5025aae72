"""How the verbs read their settings, and how they tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pydantic_core import PydanticUndefined
from rich.console import Console

from agentrl import registry
from agentrl.config import Layer, TrainConfig, known_settings, read_overrides, read_toml
from agentrl.env import EnvSpec
from agentrl.signature import arguments_model


def layers(words: Sequence[str]) -> list[Layer]:
    """``run.toml --learner.lr 2e-6``: the files first, in order, then the overrides. No torch, so errors are quick."""
    files = [w for w in words if w.endswith(".toml") and not w.startswith("-")]
    first = next((i for i, w in enumerate(words) if w.startswith("--")), len(words))
    leading = [w for w in words[:first] if w in files]
    rest = [w for w in words[:first] if w not in files] + list(words[first:])
    return [*(read_toml(Path(f)) for f in leading), read_overrides(rest)]


def loading(console: Console) -> AbstractContextManager[object]:
    """Something that moves while torch and transformers are imported."""
    return console.status("loading torch and transformers") if console.is_terminal else nullcontext()


def spec_of(config: TrainConfig) -> EnvSpec:
    own = dict(config.env)
    return EnvSpec(own.pop("name"), **own).equipped(config.tools, config.tool)


def help_text(sections: Sequence[str] = ()) -> str:
    """Every setting with its default and what it is; only those of some sections, if any are named."""
    lines = []
    for name, field in known_settings().items():
        if sections and name.partition(".")[0] not in sections:
            continue
        default = (
            ""
            if field.default in (PydanticUndefined, None, ())
            else f" [{getattr(field.default, 'name', field.default)}]"
        )
        lines.append(f"  --{name:<28} {field.description or _words(name)}{default}")
    return "\n".join(lines)


def env_help(env: str) -> str:
    """The settings of one environment."""
    cls, _ = registry.member("env", env)
    model = arguments_model(cls.__init__, f"env {env!r}")
    fields = (
        f"  --env.{f.alias} [{'required' if f.is_required() else f.default}]" for f in model.model_fields.values()
    )
    return "\n".join([f"settings of {env}: {(cls.__doc__ or '').strip()}", *fields])


def _words(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ")
