"""The types that a user's environment has, as mypy sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CITY_QUIZ = """
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, assert_type

from agentrl import Env, Reply, Step, ToolEnv, Trajectory, evaluate, tool, train
from agentrl.types import Observation


class Cities(dict[str, str]):
    def capital(self, country: str) -> str:
        return self[country]


class Quiz(ToolEnv[Cities]):
    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[Cities]:
        yield Cities(France="Paris")

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, str]]:
        assert_type(self.shared, Cities)
        return self.ask("France?"), {"expected": self.shared.capital("France")}

    @tool
    async def look_up(self, country: str) -> str:
        return self.shared.capital(country)

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"right": float(self.shared.capital("France") in trajectory.answer)}


class Plain(Env):
    async def step(self, action: Reply) -> Step:
        return Step("more", 0.0, False, False, {"said": len(action.content)})


train(Quiz, env_args={}, steps=1)
train(Plain)
evaluate(Quiz, "nano")
"""


def check(folder: Path, source: str) -> str:
    (folder / "quiz.py").write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder), "quiz.py"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "MYPYPATH": f"{root}:{root / 'envs'}:{root / 'tools'}"}
    run = subprocess.run(
        [*command, "--follow-imports=silent"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return run.stdout + run.stderr


@pytest.mark.long
def test_a_users_environment_is_typed_and_its_shared_part_too(tmp_path: Path) -> None:
    assert "Success: no issues found in 1 source file" in check(tmp_path, CITY_QUIZ)
    wrong = CITY_QUIZ
    for right, mistake in (
        ("self.shared.capital(country)", "self.shared.capitol(country)"),
        ('Step("more", 0.0, False, False', 'Step("more", 0.0, False, None'),
        ("train(Plain)", "train(Cities)"),
    ):
        wrong = wrong.replace(right, mistake)
    told = check(tmp_path, wrong)
    assert '"Cities" has no attribute "capitol"' in told
    assert 'Argument 4 to "Step" has incompatible type "None"; expected "bool"' in told
    assert 'Argument 1 to "train" has incompatible type "type[Cities]"' in told
