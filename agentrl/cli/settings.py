"""How the verbs read their settings, and how they tell of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined
from rich.console import Console

from agentrl.config import TrainConfig
from agentrl.env import EnvSpec
from agentrl.layers import Layer, known_settings, read_overrides, read_toml
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


def help_text(listed: Callable[[str], bool] = lambda name: True) -> str:
    """List every setting with its default and what it is; only those whose names are ``listed``."""
    lines = []
    for name, field in known_settings().items():
        if not listed(name):
            continue
        default = (
            ""
            if field.default in (PydanticUndefined, None, ()) or field.default == {}
            else f" [{getattr(field.default, 'name', field.default)}]"
        )
        lines.append(f"  --{name:<28} {field.description or _words(name)}{default}")
    return "\n".join(lines)


def of_class(what: str, cls: Any, prefix: str) -> str:
    """What an environment, a toolset or a reward is, and its settings."""
    fields = arguments_model(cls.__init__, what).model_fields.values()
    lines = (f"  --{prefix}.{f.alias} [{'required' if f.is_required() else f.default}]" for f in fields)
    return "\n".join([f"{what}: {inspect.getdoc(cls) or ''}", *(["", "settings:"] if fields else []), *lines])


def _words(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ")
