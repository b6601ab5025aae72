"""TRL's tests of GRPOTrainer's rewards: functions, models, weights, what they are given and what they log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from agentrl.errors import UserError
from agentrl.rewards.reward_model import RewardModel
from tests.trl.trainer import CHATS, ROWS, different_letters, tiny, tokenizer, train_trl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judges") / "judge"
    torch.manual_seed(1)
    config = Qwen3Config.from_dict(tiny().config.to_dict() | {"num_labels": 1})
    model = Qwen3ForSequenceClassification(config).float()
    model.score.weight.data.normal_(0, 1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def lengths(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(len(c)) for c in completions]


async def asked(completions: Sequence[Any], **columns: Any) -> list[float]:
    return different_letters(completions)


def not_applicable(completions: Sequence[Any], **columns: Any) -> list[None]:
    return [None] * len(completions)


def one(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def zero(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def test_train_different_reward_model(tmp_path: Path, judge: Path) -> None:
    run = train_trl(tmp_path, reward_funcs=[f"reward-model:{judge}"])
    assert all(run.changed().values())


def test_train_reward_func_standard(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, reward_funcs=lengths).changed().values())


def test_train_reward_func_conversational(tmp_path: Path) -> None:
    def reward(completions: Any, **columns: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    assert all(train_trl(tmp_path, reward_funcs=reward, train_dataset=CHATS).changed().values())


def test_train_multiple_reward_funcs(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, reward_funcs=[lengths, different_letters]).changed().values())


def test_train_sync_and_async_reward_funcs(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, reward_funcs=[lengths, one, asked]).changed().values())


def test_train_multiple_reward_funcs_with_none_output(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, reward_funcs=[lengths, not_applicable]).changed().values())


def test_train_multiple_reward_funcs_with_weights(tmp_path: Path) -> None:
    run = train_trl(tmp_path, reward_funcs=[lengths, different_letters], reward_weights=[0.7, 0.3])
    assert all(run.changed().values())
    for name in ("lengths", "different_letters"):
        assert run.metric(f"rewards/{name}/mean") >= 0
        assert run.metric(f"rewards/{name}/std") >= 0


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_reward_metric_reflects_reward_weights(tmp_path: Path, aggregation: str) -> None:
    weights = {"reward_funcs": [one, zero], "reward_weights": [0.7, 0.3]}
    run = train_trl(tmp_path, multi_objective_aggregation=aggregation, **weights)
    assert run.metric("reward") == pytest.approx(0.7, abs=1e-5)


def test_train_multiple_mixed_reward_funcs(tmp_path: Path, judge: Path) -> None:
    assert all(train_trl(tmp_path, reward_funcs=[lengths, f"reward-model:{judge}"]).changed().values())


def test_train_reward_func_additional_column(tmp_path: Path) -> None:
    def reward(completions: list[str], some_values: list[int], **columns: Any) -> list[float]:
        return [float(abs(len(c) - value)) for c, value in zip(completions, some_values, strict=True)]

    rows = [{**row, "some_values": number} for number, row in enumerate(ROWS)]
    assert all(train_trl(tmp_path, reward_funcs=reward, train_dataset=rows).changed().values())


def test_warning_raised_all_rewards_none(tmp_path: Path) -> None:
    """The run ends with a sentence before it trains, where TRL warns and trains on."""
    with pytest.raises(UserError, match=r"Every reward was None \(not_applicable\)"):
        train_trl(tmp_path, reward_funcs=not_applicable)


def test_train_with_reward_func_accessing_trainer_state(tmp_path: Path) -> None:
    steps: list[int] = []

    def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        return different_letters(completions)

    train_trl(tmp_path, reward_funcs=reward)
    assert {0, 1} <= set(steps)


def test_train_reward_func_with_log_extra(tmp_path: Path) -> None:
    def reward(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("test_column", [c[:5] for c in completions])
        return different_letters(completions)

    run = train_trl(tmp_path, reward_funcs=reward, log_completions=True)
    file = sorted((run.folder / "trajectories").glob("train-*.parquet"))[0]
    assert "test_column" in json.dumps(pq.read_table(file).to_pylist(), default=str)


def test_train_reward_func_with_log_metric(tmp_path: Path) -> None:
    def reward(completions: list[str], log_metric: Any, **columns: Any) -> list[float]:
        log_metric("custom_accuracy", 0.75)
        return different_letters(completions)

    assert train_trl(tmp_path, reward_funcs=reward).metric("custom_accuracy") == 0.75


def test_no_reward_source_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reward"):
        train_trl(tmp_path, reward_funcs=[])


def test_correct_reward_processing_classes_list(tmp_path: Path, judge: Path) -> None:
    """Each reward model brings the tokenizer of its folder."""
    shutil.copytree(judge, tmp_path / "other")
    both = [f"reward-model:{judge}", f"reward-model:{tmp_path / 'other'}"]
    assert all(train_trl(tmp_path, reward_funcs=both).changed().values())


def test_single_reward_model_with_single_processing_class(tmp_path: Path, judge: Path) -> None:
    model = Qwen3ForSequenceClassification.from_pretrained(judge)
    assert all(train_trl(tmp_path, reward_funcs=RewardModel(model, tokenizer())).changed().values())
