"""Evaluation sets: held-out tasks beside the run's own, each of a split, or of an environment with other settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.scope import check_split
from agentrl.settings.schema import TrainConfig


@dataclass(frozen=True)
class EvaluationSet:
    """A set of held-out tasks by its name, which stands in metrics (``eval/NAME/reward``) and names its episodes."""

    name: str
    spec: EnvSpec
    split: str
    tasks: int
    final_tasks: int


def build_sets(config: TrainConfig, spec: EnvSpec) -> list[EvaluationSet]:
    """Build the sets that ``eval.sets`` names; ``spec`` is the run's.

    Raises:
        ConfigError: one has no such environment, setting or split; the sentence names the set.
    """
    return [_build_set(name, config, spec) for name in config.eval.sets]


def find_set(config: TrainConfig, spec: EnvSpec, split: str) -> tuple[EnvSpec, str]:
    """Return the environment and the split of episodes that are stored under ``split``, or under a set's name."""
    if split not in config.eval.sets:
        return spec, split
    chosen = _build_set(split, config, spec)
    return chosen.spec, chosen.split


def _build_set(name: str, config: TrainConfig, spec: EnvSpec) -> EvaluationSet:
    own = config.eval.sets[name]
    try:
        varied = vary_spec(config, spec, own.env)
        splits = varied.list_splits()
        split = own.split or (name if name in splits else "test")
        check_split(varied, split, "split")
    except UserError as error:
        raise ConfigError(f"eval.sets.{name}: {error}") from None
    common = config.eval
    return EvaluationSet(name, varied, split, own.tasks or common.tasks, own.final_tasks or common.final_tasks)


def vary_spec(config: TrainConfig, spec: EnvSpec, env: Mapping[str, Any]) -> EnvSpec:
    """Return the run's environment with other settings, or another one where ``env`` has a name.

    It is the run's own where there are no settings, and shares what is held open for it.
    """
    settings = dict(env)
    if not settings:
        return spec
    if (name := settings.pop("name", None)) is not None:
        return EnvSpec(str(name), **settings)
    return EnvSpec(spec.source, **{**spec.settings, **settings}).with_tools(config.tools, config.tool)


@asynccontextmanager
async def hold_open(specs: Iterable[EnvSpec], own: EnvSpec) -> AsyncIterator[None]:
    """Hold environments open until the block ends, beside the run's own one, which is open already."""
    async with AsyncExitStack() as stack:
        for spec in specs:
            if spec is not own:
                await stack.enter_async_context(spec.open())
        yield
