"""Evaluation sets: held-out tasks beside the run's own, each of a split, or of an environment with other settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.scope import check_split
from agentrl.settings.schema import EvalSetConfig, TrainConfig


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
    return [_build_set(name, own, config, spec) for name, own in config.eval.sets.items()]


def find_set(config: TrainConfig, spec: EnvSpec, split: str) -> tuple[EnvSpec, str]:
    """Return the environment and the split of episodes that are stored under ``split``, or under a set's name."""
    own = config.eval.sets.get(split)
    if own is None:
        return spec, split
    chosen = _build_set(split, own, config, spec)
    return chosen.spec, chosen.split


def _build_set(name: str, own: EvalSetConfig, config: TrainConfig, spec: EnvSpec) -> EvaluationSet:
    try:
        varied = _vary(config, spec, own)
        splits = varied.list_splits()
        split = own.split or (name if name in splits else "test")
        check_split(varied, split, "split")
    except UserError as error:
        raise ConfigError(f"eval.sets.{name}: {error}") from None
    common = config.eval
    return EvaluationSet(name, varied, split, own.tasks or common.tasks, own.final_tasks or common.final_tasks)


def _vary(config: TrainConfig, spec: EnvSpec, own: EvalSetConfig) -> EnvSpec:
    """Return the run's environment where the set names no other settings, and shares what is held open for it."""
    settings = dict(own.env)
    if not settings:
        return spec
    if (name := settings.pop("name", None)) is not None:
        return EnvSpec(str(name), **settings)
    return EnvSpec(spec.source, **{**spec.settings, **settings}).with_tools(config.tools, config.tool)


@asynccontextmanager
async def open_sets(config: TrainConfig, spec: EnvSpec) -> AsyncIterator[Sequence[EvaluationSet]]:
    """Build the sets, and hold the environments open that are not the run's own."""
    async with AsyncExitStack() as stack:
        sets = build_sets(config, spec)
        for own in sets:
            if own.spec is not spec:
                await stack.enter_async_context(own.spec.open())
        yield sets
