"""The settings of supervised fine-tuning: what is demonstrated, and how many a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import Field

from agentrl.settings.section import Section
from agentrl.settings.values import CommaSeparated

EXPERT = "expert"  # the data that the environment's own expert plays
DEFAULTS: tuple[str, Mapping[str, Any]] = (
    "agentrl sft",
    {"learner": {"lr": 2e-5}},
)  # what a model may recommend otherwise
BY_DEFAULT = 256  # tasks that it plays where neither they nor the steps are given


class SftConfig(Section):
    """Demonstrations to learn from. Without ``data`` there are none."""

    data: CommaSeparated = Field(
        (),
        description="expert: the environment's own plays; or files of conversations (JSON lines, Parquet) and run "
        "folders; commas between them",
    )
    where: str | None = Field(
        None, description='the episodes of run folders that are taken, as the search of `agentrl view`: "reward>=1"'
    )
    min_reward: float | None = Field(
        None, description="demonstrations that earned less are left out; the environment's best_reward by default"
    )
    tasks: int | None = Field(None, ge=1, description="training tasks that the expert plays; as many as the steps need")
    batch_size: int = Field(16, ge=1, description="demonstrations a step")

    @pydantic.model_validator(mode="after")
    def _used(self) -> SftConfig:
        folders = [d for d in self.data if d != EXPERT]
        changed = [n for n, f in type(self).model_fields.items() if n != "data" and getattr(self, n) != f.default]
        if not self.data and changed:
            name = changed[0]
            raise ValueError(f"{name} is of demonstrations, and sft.data names none: agentrl sft")
        if self.where is not None and not folders:
            raise ValueError("where is a query on run folders, and sft.data names none; the expert's: min_reward")
        if self.tasks is not None and EXPERT not in self.data:
            raise ValueError("tasks are those that the expert plays, and sft.data does not name it")
        return self


def build_sft_layer(rounds: int | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return the settings of ``agentrl sft``, under those that the user gives.

    Args:
        rounds: of sampling, each learned from where it earned enough; None: demonstrations are learned from.
    """
    if rounds is not None:
        learner = {"loss": "sft", "advantage": "rejection_sampling"}
        return "agentrl sft --rounds", {"learner": learner, "steps": rounds}
    learner = {"loss": "sft", "advantage": "demonstrated"}
    return "agentrl sft", {"learner": learner, "sft": {"data": [EXPERT]}, "epochs": 1.0}
