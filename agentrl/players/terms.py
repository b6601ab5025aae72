"""The terms of leases: how groups are rolled out, as plain data, and the rollout that a player makes of it.

An environment goes by its name and its settings, tools by theirs: each player imports them itself. What is an object of
this process alone cannot be sent, and is refused with what to write instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError
from agentrl.players.connection import Fields, Shown
from agentrl.renderer import Renderer
from agentrl.renderer.stop_strings import StopStrings
from agentrl.rollout.engine_protocol import Engine
from agentrl.rollout.episode import Branching, EpisodeLimits
from agentrl.rollout.folding import Folding
from agentrl.rollout.rollout import Rollout
from agentrl.runtime import worker_wire
from agentrl.settings.registry import load_entry
from agentrl.settings.values import find_import_name
from agentrl.types import SamplingParams

_NUMBERS = ("temperature", "max_tokens", "top_p", "top_k", "seed", "min_p", "repetition_penalty")


def describe_terms(rollout: Rollout, context: str) -> Fields:
    """Describe a rollout as JSON can hold it.

    Args:
        context: the name of what folds contexts.

    Raises:
        ConfigError: its environment, or a tool, is an object of this process.
    """
    sampling, folding, branching = rollout.sampling, rollout.folding, rollout.branching
    return {
        "env": describe_spec(rollout.spec),
        "split": rollout.split,
        "options": pack_plain(rollout.options, "options"),
        "limits": asdict(rollout.limits),
        "sampling": {name: getattr(sampling, name) for name in _NUMBERS},
        "stop": None if sampling.stop is None else list(sampling.stop.strings),
        "grammar": sampling.grammar is not None,
        "routed_experts": sampling.routed_experts_start is not None,
        "oversample": rollout.oversample,
        "branching": None if branching is None else [branching.turn, branching.branches],
        "folding": None if folding is None else [context, folding.budget, folding.summary_tokens],
    }


def describe_spec(spec: EnvSpec) -> Fields:
    """Describe an environment by names and settings. Raises ConfigError: it, or a tool, is an object of this one."""
    source, binding = spec.source, spec.tool_binding
    name = source if isinstance(source, str) else find_import_name(source)
    if name is None or ":<" in name:
        raise ConfigError(
            f"env {spec.name!r} is a class of this process, which no player can import: put it into a file, and name "
            "it as file.py:Class or module:Class"
        )
    tools = [t if isinstance(t, str) else None for t in binding.extra_tools]
    if None in tools:
        raise ConfigError(
            f"tools: {binding.extra_tools[tools.index(None)]!r:.80} is an object of this process, which no player can "
            "import: put it into a file, and name it as file.py:name or module:name"
        )
    settings = pack_plain(spec.settings, f"env {name!r}: a setting")
    return {
        "name": name,
        "settings": settings,
        "tools": tools,
        "tool": pack_plain(binding.settings, "a tool's setting"),
    }


def pack_plain(values: Shown, what: str) -> str:
    """Write plain data as text. Raises ConfigError: it holds an object of this process."""
    try:
        return worker_wire.pack_value({key: _as_plain(value) for key, value in values.items()}).decode()
    except (worker_wire.NotPlainError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what} is {error}, which cannot be sent to a player: give it as text, numbers, lists and tables"
        ) from None


def unpack_plain(text: str) -> Fields:
    """Read what `pack_plain` wrote."""
    values: Fields = worker_wire.unpack_value(text.encode())
    return values


def _as_plain(value: Any) -> Any:
    """Return a setting as it was written: a path, a secret's name."""
    if isinstance(value, Mapping):
        return {key: _as_plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(own) for own in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of numpy's, or a tensor of one
        return value.item()
    name = type(value).__name__
    return str(value) if name in ("Secret", "PosixPath", "WindowsPath") else value


@asynccontextmanager
async def open_spec(described: Shown) -> AsyncIterator[EnvSpec]:
    """Import an environment, and hold open what its episodes share.

    Raises:
        UserError: it, or a tool, cannot be imported or opened here.
    """
    spec = EnvSpec(described["name"], **unpack_plain(described["settings"]))
    spec.with_tools(described["tools"], unpack_plain(described["tool"]))
    async with spec.open():
        yield spec


def build_rollout(terms: Shown, spec: EnvSpec, engine: Engine, renderer: Renderer, grammar: Any) -> Rollout:
    """Build the rollout that `describe_terms` described."""
    stop = None if terms["stop"] is None else StopStrings(tuple(terms["stop"]), renderer.decode)
    sampling = SamplingParams(
        **terms["sampling"],
        stop=stop,
        grammar=grammar if terms["grammar"] else None,
        routed_experts_start=0 if terms["routed_experts"] else None,
    )
    limits, options = EpisodeLimits(**terms["limits"]), unpack_plain(terms["options"])
    rollout = Rollout(spec, engine, renderer, limits, sampling, terms["split"], options)
    rollout.oversample = terms["oversample"]
    if terms["branching"] is not None:
        rollout.branching = Branching(*terms["branching"])
    if terms["folding"] is not None:
        name, budget, summary_tokens = terms["folding"]
        rollout.folding = Folding(load_entry("context", name), budget, summary_tokens)
    return rollout
