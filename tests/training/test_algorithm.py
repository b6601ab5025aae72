"""A run says how the learner's distribution differs from the one that was sampled from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import train
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.settings.loader import build_config
from agentrl.settings.schema import TrainConfig
from agentrl.testing import ScriptedEngine
from agentrl.training.algorithm import explain_truncation
from tests.helpers.tiny import qwen3


def config(**sections: dict[str, Any]) -> TrainConfig:
    return build_config(("test", {"env": "shop", **sections}))


def test_an_engine_that_keeps_no_sets_is_corrected_for_and_the_run_says_so() -> None:
    engine = ScriptedEngine([])
    assert explain_truncation(config(), engine) is None
    assert explain_truncation(config(rollout={"repetition_penalty": 1.1}), engine) is None
    said = explain_truncation(config(rollout={"top_p": 0.9, "min_p": 0.05}), engine)
    assert said is not None
    assert said.startswith("rollout.top_p and rollout.min_p: this engine does not say which tokens it left out")
    assert "importance sampling (token_truncate) corrects for it" in said
    assert explain_truncation(config(rollout={"top_p": 0.9}), TransformersEngine(qwen3())) is None


def test_without_a_correction_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.top_k: this engine .* none corrects for nothing"):
        explain_truncation(
            config(rollout={"top_k": 9}, learner={"importance_sampling_mode": "none"}), ScriptedEngine([])
        )


def test_sampling_that_learns_nothing_or_keeps_nothing_is_refused() -> None:
    for rollout in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"repetition_penalty": 0}, {"max_episode_tokens": 0}):
        with pytest.raises(ConfigError, match=r"rollout"):
            config(rollout=rollout)


@pytest.mark.long
def test_a_policy_learns_from_truncated_sampling_in_two_passes_over_each_batch(tmp_path: Path) -> None:
    run = train(
        "math-tools",
        steps=6,
        rollout={"top_p": 0.9, "min_p": 0.05},
        learner={"num_iterations": 2},
        eval={"every": 0, "final_tasks": 64},
        run={"dir": str(tmp_path / "run")},
    )
    history = run.history
    rewards = history["reward"].dropna().tolist()  # without the evaluation before the first step
    assert rewards[0] < 0.5
    assert rewards[-1] > 0.75
    assert history["sampling/sampling_logp_difference/max"].max() < 1e-3
