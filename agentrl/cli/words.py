"""The words after a verb: what it is about, then ``--name value``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from agentrl.config import Section
from agentrl.errors import ConfigError, nearest
from agentrl.layers import read_overrides
from agentrl.signature import problems

S = TypeVar("S", bound=Section)


def split(words: Sequence[str], settings: type[S], usage: str) -> tuple[list[str], S]:
    """The leading words, and the settings.

    Raises:
        ConfigError: there is no leading word, or a setting is unknown or wrong.
    """
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    names = list(words[:first])
    if not names:
        raise ConfigError(f"it takes: {usage}")
    return names, flags(words[first:], settings)


def flags(words: Sequence[str], settings: type[S]) -> S:
    """The settings that ``--name value`` words give. Raises ConfigError: one is unknown, missing or wrong."""
    source, given = read_overrides(words)
    for name in given:
        if name not in settings.model_fields:
            raise ConfigError(f"{name}: unknown setting{nearest(name, settings.model_fields)} [{source}]")
    return check_settings(given, settings)


def check_settings(given: Mapping[str, Any], settings: type[S]) -> S:
    """Check settings. Raises ConfigError: one is missing or wrong."""
    try:
        return settings.model_validate(given)
    except pydantic.ValidationError as error:
        where, what = problems(error)[0]
        if what == "field required":
            raise ConfigError(f"--{where} is missing: {settings.model_fields[where].description}") from None
        raise ConfigError(f"--{where}: {what}" + (f", not {given[where]!r}" if where in given else "")) from None


def flags_told(settings: type[Section]) -> str:
    """A line for each setting."""
    return "\n".join(f"  --{name:<8} {field.description}" for name, field in settings.model_fields.items())
