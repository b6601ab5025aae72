"""It learns: the numbers the README promises, on the machine the tests run on. Minutes each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import agentrl_envs
import pytest

from agentrl import evaluate, sft, train

pytestmark = pytest.mark.slow
WHOLE = "AGENTRL_SEEDS" in os.environ  # make long ARGS=seeds; else two trainings are cut short
DATA = Path(agentrl_envs.__file__).parent / "data"


@pytest.mark.parametrize("seed", range(int(os.environ.get("AGENTRL_SEEDS", 1))))  # `make long` trains five
def test_math_tools_is_learned(seed: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    summary = train("math-tools", seed=seed, run={"dir": folder}).summary
    report("math-tools", summary)
    assert summary["reward_before"] <= 0.40
    assert summary["greedy_before"] <= 0.30
    assert summary["reward_after"] >= 0.90
    assert summary["greedy_after"] >= 0.95
    assert summary["steps"] <= 50
    assert summary["after"]["sampled"]["calls"] > 0.9
    elsewhere = evaluate("math-tools", folder, tasks=256, first=1_000_000, out=str(tmp_path / "eval"))
    assert abs(elsewhere.reward - summary["reward_after"]) < 4 * elsewhere.stderr + 0.02


@pytest.mark.long
def test_an_adapter_learns_as_much(tmp_path: Path) -> None:
    folder, steps = str(tmp_path / "run"), 100 if WHOLE else 25
    summary = train("math-tools", steps=steps, lora={"rank": 8}, learner={"lr": 5e-3}, run={"dir": folder}).summary
    report("math-tools, LoRA", summary)
    assert summary["reward_after"] >= (0.90 if WHOLE else summary["reward_before"] + 0.30)
    assert summary["greedy_after"] >= (0.95 if WHOLE else summary["greedy_before"] + 0.30)


@pytest.mark.long
def test_shop_is_learned(tmp_path: Path) -> None:
    summary = train("shop", steps=20 if WHOLE else 10, run={"dir": str(tmp_path / "run")}).summary
    report("shop", summary)
    assert summary["reward_before"] <= 0.35
    assert summary["reward_after"] >= (0.80 if WHOLE else 0.60)
    assert summary["after"]["sampled"]["calls"] > 2.0


@pytest.mark.long
def test_a_dataset_of_prompts_is_learned(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "data": str(DATA / "symbols.jsonl"),
        "test_data": str(DATA / "symbols-test.jsonl"),
        "system_prompt": "Answer with \\boxed{}.",
    }
    summary = train("prompts", env_args=settings, steps=25, run={"dir": str(tmp_path / "run")}).summary
    report("prompts", summary)
    assert summary["reward_before"] <= 0.40
    assert summary["reward_after"] >= summary["reward_before"] + 0.3


def report(name: str, summary: dict[str, Any]) -> None:
    """The figures, for whoever reads the log (pytest -s, or CI's)."""
    keys = ("seed", "reward_before", "reward_after", "greedy_before", "greedy_after", "cpu_seconds", "train_seconds")
    print(f"\n{name}: " + "  ".join(f"{k} {summary[k]:.3g}" for k in keys))


@pytest.mark.long
def test_a_warm_start_from_the_expert_is_learned_and_trained_on(tmp_path: Path) -> None:
    """The reduced form of benchmarks/warm_starts.py: a game that nano has never seen."""
    game = {"numbers": 8}
    warm = {"lr": 4e-3, "lr_scheduler": "linear", "warmup_ratio": 0.05}
    first = sft("game", env_args=game, steps=80, learner=warm, eval={"every": 0}, run={"dir": str(tmp_path / "sft")})
    report("game, sft", first.summary)
    assert first.summary["reward_before"] <= 0.02
    assert first.summary["reward_after"] >= 0.30
    start = str(tmp_path / "sft")
    then = train("game", start, env_args=game, steps=8, learner={"lr": 4e-4}, run={"dir": str(tmp_path / "run")})
    report("game, train", then.summary)
    assert abs(then.summary["reward_before"] - first.summary["reward_after"]) < 0.05
    assert then.summary["reward_after"] >= then.summary["reward_before"] - 0.05
