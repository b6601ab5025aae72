"""Evaluations without a model, for the tests: an engine that answers by its dice, an environment that may kill."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl import Env, EnvSpec, InfraError, Reply, Step
from agentrl.evaluation.evaluate import EvaluatedPolicy, run_evaluation
from agentrl.evaluation.folder import EvaluationFolder
from agentrl.evaluation.measurement import Evaluation
from agentrl.evaluation.scope import EvaluationScope
from agentrl.rollout.rollout import Rollout
from agentrl.settings.loader import build_config
from agentrl.settings.schema import TrainConfig
from agentrl.testing import STOP, ByteRenderer
from agentrl.types import Completion, Observation, SamplingParams, Trajectory

WHOLE = EvaluationScope(tasks=40, sampled=3)


class Dice:
    """An engine that says a number from 0 to 9: by the turn's seed, or by the task where it is greedy."""

    capacity, max_context, version = 8, 1 << 20, 0

    def __init__(self, skill: int = 5) -> None:
        self.skill = skill

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        number = params.seed % 10 if params.temperature else self.skill
        ids = (*str(number).encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")

    def end_session(self, session: str) -> None: ...
    async def update_weights(self, policy: Any, version: int) -> None: ...
    async def close(self) -> None: ...


class Below(Env):
    """Say a number below that of the task (modulo 10).

    Args:
        kill_at: resets after which the process is killed, as by the kernel.
        broken: every task of a multiple of it fails to start; 0: none.
        words: of the question.
    """

    resets = 0

    def __init__(self, kill_at: int = 0, broken: int = 0, words: str = "Say a number below") -> None:
        super().__init__()
        self.kill_at, self.broken, self.words = kill_at, broken, words

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        Below.resets += 1
        if Below.resets == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.task = seed % 10
        if self.broken and seed % self.broken == 0:
            raise InfraError("closed", "no entrance")
        return f"{self.words} {self.task}.", {}

    async def step(self, reply: Reply) -> Step:
        return Step("", 0.0, True, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"correct": float(int(trajectory.answer) < self.task)}

    def count(self, split: str) -> int | None:
        return 1000


def settings(**env: Any) -> TrainConfig:
    return build_config(("test", {"env": {"name": "tests.helpers.evaluations:Below", **env}, "model": "dice"}))


@asynccontextmanager
async def playing(spec: EnvSpec, engine: Any, identity: str) -> AsyncIterator[EvaluatedPolicy]:
    async with spec.open():
        yield EvaluatedPolicy(lambda split: Rollout(spec, engine, ByteRenderer(), split=split), identity)


async def evaluated(
    out: Path | str, scope: EvaluationScope = WHOLE, *, identity: str = "dice", skill: int = 5, **env: Any
) -> tuple[Evaluation, EvaluationFolder]:
    """Evaluate into a folder; what ``kill_at`` and ``retry_faults`` say is no setting of the folder's."""
    retry, kill_at = env.pop("retry_faults", False), env.pop("kill_at", 0)
    spec = EnvSpec("tests.helpers.evaluations:Below", **env, kill_at=kill_at)
    player = playing(spec, Dice(skill), identity)
    return await run_evaluation(settings(**env), spec, scope, player, out=str(out), retry_faults=retry)


if __name__ == "__main__":
    import sys

    import anyio

    from tests.helpers.evaluations import (
        evaluated as by_name,  # one class of environments, by whatever name it is found
    )

    async def main() -> None:
        await by_name(sys.argv[1], kill_at=int(sys.argv[2]))

    anyio.run(main)
