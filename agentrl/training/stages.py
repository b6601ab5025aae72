"""The stages of a run: each has steps, an environment and some settings of its own; policy and optimizer go through.

    [[stages]]                       steps 1 to 20
    steps = 20
    env.rewards = ["boxed"]          the run's environment, with another reward

    [[stages]]                       steps 21 to 60
    steps = 40
    rollout.group_size = 16

Evaluations are of the run's own environment from the first step to the last, so that they compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pydantic

from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.sets import vary_spec
from agentrl.settings.schema import TrainConfig
from agentrl.settings.signature import list_problems


@dataclass(frozen=True)
class Stage:
    """A stretch of a run's steps, with the settings that hold there."""

    number: int  # from 1 on
    name: str
    config: TrainConfig
    spec: EnvSpec
    first: int  # step
    last: int
    resets_optimizer: bool = False

    def __str__(self) -> str:
        return f"stage {self.number}" + (f", {self.name}" if self.name else "")


def build_stages(config: TrainConfig, spec: EnvSpec) -> list[Stage]:
    """Build the stages that the settings name; the whole run is one where they name none.

    Raises:
        ConfigError: a stage has a setting, or an environment, that is none; the sentence names the stage.
    """
    if not config.stages:
        return [Stage(1, "", config, spec, 1, config.steps)]
    stages: list[Stage] = []
    for number, own in enumerate(config.stages, 1):
        first = stages[-1].last + 1 if stages else 1
        try:
            varied = vary_spec(config, spec, own.env)
        except UserError as error:
            raise ConfigError(f"stages.{number - 1}: {error}") from None
        name, last = own.name or "", first + own.steps - 1
        stages.append(Stage(number, name, _merge(config, number), varied, first, last, own.reset_optimizer))
    return stages


def _merge(config: TrainConfig, number: int) -> TrainConfig:
    """Return the run's config with a stage's own settings over it, checked as the run's is."""
    own = config.stages[number - 1]
    settings_by_section = {"rollout": own.rollout, "learner": own.learner}
    given = config.model_dump(exclude_unset=True, exclude={"stages", "tools"})
    sections = {name: {**given.get(name, {}), **settings} for name, settings in settings_by_section.items()}
    try:
        checked = TrainConfig.model_validate({**given, "env": config.env, **sections})
    except pydantic.ValidationError as error:
        where, wrong = list_problems(error)[0]
        raise ConfigError(f"stages.{number - 1}{f'.{where}' if where else ''}: {wrong}") from None
    seed = (config.seed + number - 1) % 2**31  # the same environment again gives other tasks, where it draws them
    return config.model_copy(update={"rollout": checked.rollout, "learner": checked.learner, "seed": seed})


def find_stage(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage of a step; the first one for step 0."""
    return next(stage for stage in stages if step <= stage.last)
