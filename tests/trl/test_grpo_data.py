"""TRL's tests of GRPOTrainer's datasets: streams, several evaluation sets, evaluations in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.errors import UserError
from tests.trl.trainer import ROWS, different_letters, tiny, tokenizer, train_trl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
HELD_OUT = [{"prompt": f"Held out {number}"} for number in range(3)]
KINDS = ["dataset", "iterable_dataset", "dataset_dict", "iterable_dataset_dict", "dict_of_dataset"]
KINDS += ["dict_of_iterable_dataset"]


def held_out(kind: str) -> Any:
    """An evaluation dataset of a kind, over the same rows."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(HELD_OUT)
    rows = rows.to_iterable_dataset() if "iterable" in kind else rows
    if kind in ("dataset", "iterable_dataset"):
        return rows
    both = {"data1": rows, "data2": rows}
    if kind.startswith("dict_of"):
        return both
    return datasets.IterableDatasetDict(both) if "iterable" in kind else datasets.DatasetDict(both)


def test_train_with_eval(tmp_path: Path) -> None:
    run = train_trl(tmp_path, eval={"final_tasks": 1}, eval_dataset=HELD_OUT, eval_strategy="steps", eval_steps=1)
    assert len(run.evaluations) >= 3  # before, between, after


def test_train_with_num_generations_eval(tmp_path: Path) -> None:
    given = {"eval_dataset": HELD_OUT, "eval_strategy": "steps", "eval_steps": 1, "eval": {"final_tasks": 1}}
    assert train_trl(tmp_path, num_generations_eval=1, **given).evaluations


def test_train_eval_on_start(tmp_path: Path) -> None:
    given = {"eval_dataset": HELD_OUT, "eval_strategy": "steps", "eval_steps": 2, "eval": {"final_tasks": 1}}
    run = train_trl(tmp_path, eval_on_start=True, loss_type="grpo", **given)
    assert run.evaluations[0]["step"] == 0


def test_train_with_iterable_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert all(train_trl(tmp_path, train_dataset=stream, eval_dataset=HELD_OUT, max_steps=4).changed().values())


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_init_with_eval_dataset(tmp_path: Path, kind: str) -> None:
    given = {} if kind == "none" else {"eval_dataset": held_out(kind)}
    assert train_trl(tmp_path, max_steps=1, **given).evaluations


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_with_eval_dataset(tmp_path: Path, kind: str) -> None:
    """An evaluation takes rows directly; of several datasets it names one as its split."""
    data: dict[str, Any] = {"reward_funcs": different_letters, "train_dataset": ROWS, "eval_dataset": held_out(kind)}
    for split in ("data1", "data2") if "dict" in kind else ("test",):
        measured = agentrl.evaluate(
            "prompts",
            tiny(),
            tokenizer=tokenizer(),
            split=split,
            tasks=2,
            max_completion_length=8,
            out=tmp_path / split,
            **data,
        )
        assert measured.tasks == 2


def test_iterable_dataset_forces_num_workers_zero(tmp_path: Path) -> None:
    """There are no workers to force: rows are read by the run's own process."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    run = train_trl(tmp_path, train_dataset=stream, eval_dataset=HELD_OUT, dataloader_num_workers=4, max_steps=1)
    assert len(run.rows) == 1


def test_iterable_eval_keeps_map_style_train_workers(tmp_path: Path) -> None:
    assert train_trl(tmp_path, eval_dataset=held_out("iterable_dataset"), dataloader_num_workers=4).evaluations


def test_dataset_required_without_environment(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs a value for --env\.data"):
        train_trl(tmp_path, train_dataset=...)
