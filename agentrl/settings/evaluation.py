"""The settings of the evaluations, of a run's own held-out tasks and of further sets."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from agentrl.settings.section import Section
from agentrl.settings.signature import is_plain
from agentrl.settings.values import split_commas


class _EvalSetConfig(Section):
    """A set of held-out tasks beside the run's own."""

    env: dict[str, Any] = Field({}, description="settings that differ from the run's; with a name, another environment")
    split: str | None = Field(None, description="of the environment; the set's name by default if it has it, else test")
    tasks: int | None = Field(None, ge=1, description="eval.tasks by default")
    final_tasks: int | None = Field(None, ge=1, description="eval.final_tasks by default")

    @pydantic.field_validator("env", mode="before")
    @classmethod
    def _named(cls, env: Any) -> Any:
        return {"name": env} if isinstance(env, str) else env

    @pydantic.field_serializer("env", when_used="json")
    def _plain_env(self, env: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in env.items() if is_plain(value)}


def _name_sets(sets: Any) -> Any:
    """Return a table of sets for their names alone, in a list or with commas between them."""
    names = split_commas(sets)
    return {name: {} for name in names} if isinstance(names, list | tuple) else sets


class EvalConfig(Section):
    """The evaluation of the policy on held-out tasks."""

    every: int = Field(10, ge=0, description="steps between evaluations; 0: only before and after")
    mode: Literal["pause", "overlap"] = Field(
        "pause",
        description="pause: no training episode starts meanwhile; overlap: the next batch is rolled out beside it, and "
        "the update waits for both",
    )
    tasks: int = Field(
        128, ge=1, description="held-out tasks every eval.every steps; before and after take eval.final_tasks"
    )
    final_tasks: int = Field(
        256, ge=1, description="held-out tasks before the first step and after the last: the table at the end"
    )
    trials: int = Field(1, ge=1, description="times that each task is sampled, beside the greedy trial")
    pass_at: float = Field(1.0, description="the reward from which on a trial passes, for pass@k and pass^k")
    sets: Annotated[dict[str, _EvalSetConfig], pydantic.BeforeValidator(_name_sets)] = Field(
        {}, description="more held-out tasks, by name: --eval.sets.hard.env.level 4 gives eval/hard/reward"
    )
    metric: str = Field("eval/reward", description="by which evaluations are compared, for patience and run.load_best")
    greater_is_better: bool = Field(True, description="of eval.metric")
    patience: int | None = Field(None, ge=1, description="evaluations that are no better, after which the run ends")
    min_delta: float = Field(0.0, ge=0, description="what an evaluation must be better by to count as better")

    @pydantic.model_validator(mode="after")
    def _made(self) -> EvalConfig:
        if self.mode == "overlap" and not self.every:
            raise ValueError("mode overlap is of the evaluations in mid-run, and every 0 makes none")
        if self.patience is not None and not self.every:
            raise ValueError("patience counts evaluations in mid-run, and every 0 makes none")
        for name in self.sets:
            if name in ("train", "test") or not re.fullmatch(r"[A-Za-z]\w*", name):
                raise ValueError(f"sets: a name is letters, digits and _, and not train or test; not {name!r}")
        if self.tasks != type(self).model_fields["tasks"].default and not self.every:
            raise ValueError(
                f"tasks {self.tasks} is of the evaluations in mid-run, and every 0 makes none: final_tasks"
            )
        return self
