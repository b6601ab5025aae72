"""Supervised fine-tuning: its gradient is transformers' own, its numbers claim nothing, and it resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from agentrl import LossSettings, Run, UserError, sft, train
from agentrl.cli import main
from agentrl.credit import assign_credit
from agentrl.learner.advantages.imitation import demonstrated, rejection_sampling
from agentrl.learner.learner import Learner
from agentrl.models.policy import load_policy
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.demonstration import Demonstration
from agentrl.training.callbacks import Callback
from agentrl.types import Group, Stop, Trajectory

SMALL: dict[str, Any] = {"eval": {"final_tasks": 8, "every": 0}, "verbose": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "warm"
    return sft("math-tools", steps=4, sft={"batch_size": 8}, run={"dir": str(folder), "save_every": 2}, **SMALL)


def test_an_expert_is_learned_from_in_minutes(run: Run) -> None:
    summary = run.summary
    assert summary["greedy_before"] == 0.0
    assert summary["greedy_after"] > 0.5
    assert summary["sampled_tokens"] == 0
    assert len((run.folder / "demonstrations.jsonl").read_text().splitlines()) == 32
    assert "rollouts" not in json.loads((run.folder / "waits.json").read_text())["sentence"].lower()
    nll = [json.loads(line).get("nll") for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert next(n for n in nll if n is not None) > 0.5


def test_no_number_says_that_something_was_sampled(run: Run) -> None:
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if "nll" in row]
    assert len(steps) == 4
    for row in steps:
        assert row["sampled_tokens"] == 0
        assert row["loss"] == pytest.approx(row["nll"])
        assert not [name for name in row if name.startswith(("sampling/", "staleness/", "reward", "rewards/"))]
    for episode in pq.read_table(run.folder / "trajectories" / "train-000001.parquet").to_pylist():
        own = [s for s in episode["segments"] if s["author"] == "model"]
        assert all(s["logprobs"] is None and s["versions"] is None for s in own)
        assert all(len(s["learner_logprobs"]) == len(s["token_ids"]) for s in own)
        assert {c for s in own for c in s["corrections"]} == {1.0}
        assert episode["credit"] == "trained"


def test_explain_says_that_it_was_demonstrated(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run.folder), "train-1:0", "60"]) == 0
    told = capsys.readouterr().out
    assert "demonstrated, in turn 1: no engine sampled it" in told
    assert "before the step" in told
    assert "learner.loss sft: -A log p" in told
    episodes = run.episodes("step=1 split=train")
    assert all(t.is_demonstration for t in episodes)


def test_the_model_it_leaves_is_one_that_train_takes(run: Run, tmp_path: Path) -> None:
    rollout = {"tasks_per_step": 2, "group_size": 2}
    after = train("math-tools", str(run.folder), steps=1, rollout=rollout, run={"dir": str(tmp_path / "r")}, **SMALL)
    assert after.summary["greedy_before"] == pytest.approx(run.summary["greedy_after"])


class _Power(Callback):
    """Ends the process, as it seems, in the middle of a step."""

    def on_step_begin(self, step: int) -> None:
        if step == 4:
            raise SystemExit(9)


def test_a_killed_run_ends_as_if_nothing_had_happened(run: Run, tmp_path: Path) -> None:
    folder = str(tmp_path / "killed")
    settings = {"steps": 4, "sft": {"batch_size": 8}, **SMALL}
    with pytest.raises(SystemExit):
        sft("math-tools", run={"dir": folder, "save_every": 2}, callbacks=[_Power()], **settings)
    assert main(["sft", "--resume", folder]) == 0
    ours, theirs = (load_policy(str(f)).model.state_dict() for f in (run.folder, folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_episodes_of_a_run_are_taken_by_query(run: Run, tmp_path: Path) -> None:
    rows: dict[str, Any] = {"steps": 1, "sft": {"where": "reward >= 1  split=test step=4"}, "verbose": False}
    again = sft("math-tools", data=run.folder, run={"dir": str(tmp_path / "b")}, eval=SMALL["eval"], **rows)
    kept = [json.loads(line) for line in (again.folder / "demonstrations.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in kept} == {1.0}
    assert len(kept) == len(run.episodes("reward>=1 split=test step=4"))


def test_episodes_of_a_training_run_have_the_tools_that_they_were_offered(tmp_path: Path) -> None:
    rollout = {"tasks_per_step": 2, "group_size": 4}
    first = train("math-tools", steps=1, rollout=rollout, run={"dir": str(tmp_path / "a")}, **SMALL)
    own = {"where": "split=train calls>0 errors=0", "min_reward": 0.0}
    again = sft("math-tools", data=first.folder, run={"dir": str(tmp_path / "b")}, sft=own, **SMALL)
    (tools,) = json.loads((first.folder / "tools.json").read_text())
    for line in (again.folder / "demonstrations.jsonl").read_text().splitlines():
        assert json.loads(line)["tools"] == tools
    (first.folder / "tools.json").write_text(json.dumps([tools, []]))
    with pytest.raises(UserError, match="were offered 2 different lists of tools"):
        sft("math-tools", data=first.folder, run={"dir": str(tmp_path / "c")}, sft=own, **SMALL)


def test_rounds_learn_from_what_earned_enough(tmp_path: Path) -> None:
    rollout = {"tasks_per_step": 4, "group_size": 4}
    done = sft("math-tools", rounds=2, rollout=rollout, run={"dir": str(tmp_path / "r")}, **SMALL)
    for t in pq.read_table(done.folder / "trajectories" / "train-000001.parquet").to_pylist():
        assert t["advantage"] == float(t["reward"] == 1.0)
        assert t["credit"] == ("trained" if t["reward"] == 1.0 else "zero advantage")


def _rows(count: int) -> tuple[Any, list[Trajectory]]:
    policy = load_policy("nano")
    renderer = TemplateRenderer(policy.tokenizer, None, policy.end_tokens)
    texts = ["12.", "It is 3, and no more than that.", "\\boxed{7}", "No."]
    rows = [{"prompt": f"{n} + 1?", "completion": texts[n % 4]} for n in range(count)]
    return policy, [Demonstration.parse(row).to_trajectory(renderer, 1024) for row in rows]


@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_its_gradient_is_that_of_transformers_own_labels(packing: str) -> None:
    policy, episodes = _rows(8)
    own = load_policy("nano").model
    total = sum(t.sampled_tokens for t in episodes)
    for t in episodes:
        ids = torch.tensor([t.token_ids])
        labels = torch.where(torch.tensor([t.loss_mask]) == 1, ids, -100)
        (own(input_ids=ids, labels=labels).loss * t.sampled_tokens / total).backward()
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    settings = LossSettings(loss="sft", packing=packing, max_grad_norm=1e9, threads=1, max_tokens_per_microbatch=64)
    learner = Learner(policy.model, [torch.optim.SGD(policy.model.parameters(), lr=1.0)], settings)
    credit = assign_credit([Group(0, (t,)) for t in episodes], demonstrated, min_group_size=1)
    metrics = learner.update(credit.samples(), credit.weights())
    for name, p in own.named_parameters():
        step = before[name] - dict(policy.model.named_parameters())[name].detach()
        assert torch.allclose(step, p.grad, atol=1e-6), name
    assert metrics["loss"] == pytest.approx(metrics["nll"], rel=1e-5)


def test_an_episode_is_kept_or_not_whatever_the_others_earned() -> None:
    def member(reward: float | None) -> Trajectory:
        return Trajectory(0, (), (), Stop.TERMINATED, rewards={"r": reward})

    groups = [[member(1.0), member(0.5), member(None)], [member(1.0)]]
    assert rejection_sampling(groups) == [[1.0, 0.0, 0.0], [1.0]]
    assert rejection_sampling(groups, min_reward=0.5) == [[1.0, 1.0, 0.0], [1.0]]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "none.jsonl"], "there is no file or run folder 'none.jsonl'"),
        (["--data", "exprt"], "did you mean 'expert'?"),
        (["--data", "bad.jsonl"], "line 2 of 'bad.jsonl' is no JSON"),
        (["--data", "empty.jsonl"], "'empty.jsonl' has no rows"),
        (["--data", "list.json"], "row 1 of 'list.json': it is 7; a row is an object"),
        (["--data", "a.toml"], "they end in .jsonl, .json, .parquet"),
        (["--where", "reward>=1"], "where is a query on run folders"),
        (["--rounds", "2", "--data", "bad.jsonl"], "--rounds samples from the model itself"),
        (["--sft.tasks", "5", "--data", "bad.jsonl"], "tasks are those that the expert plays"),
        (["--learner.loss", "dapo"], "learned from with learner.loss sft"),
        (["--sft.min_reward", "2", "--steps", "1"], "there is no demonstration to learn from"),
    ],
)
def test_each_mistake_is_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files: Mapping[str, str] = {
        "bad.jsonl": '{"prompt": "a", "completion": "b"}\n{',
        "empty.jsonl": "\n",
        "list.json": "[7]",
        "a.toml": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["sft", "--env", "math-tools", *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told


def test_an_environment_without_an_expert_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="has no expert: write `async def expert"):
        sft("gym:FrozenLake-v1", steps=1, verbose=False)


def test_a_turn_longer_than_one_that_is_sampled_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few: dict[str, Any] = {"rollout": {"max_tokens": 8}, "eval": {"every": 0, "final_tasks": 1}}
    sft("math-tools", steps=1, sft={"tasks": 4}, run={"dir": str(tmp_path / "run")}, **few)
    said = " ".join("".join(capsys.readouterr()).split())
    assert "one that is sampled ends after 8: --rollout.max_tokens" in said


def fold(folder: Path, **more: Any) -> None:
    rollout = {"context": "fold", "context_budget": 220, **more.pop("rollout", {})}
    sft("search-qa", rollout=rollout, run={"dir": str(folder)}, eval={"every": 0, "final_tasks": 1}, **more)


def test_a_summary_longer_than_one_that_is_sampled_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fold(tmp_path / "run", steps=1, sft={"tasks": 4}, rollout={"summary_tokens": 8})
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"have summaries of up to \d+ tokens, and one that is sampled ends after 8: --rollout.summ", said)
    assert "--rollout.max_tokens" not in said


def test_contexts_that_no_step_takes_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch is counted in the expert's episodes, before it has played: each is several demonstrations."""
    fold(tmp_path / "run", sft={"tasks": 4, "batch_size": 4})
    said = " ".join("".join(capsys.readouterr()).split())
    count = len((tmp_path / "run" / "demonstrations.jsonl").read_text().splitlines())
    assert count > 4
    assert f"1 step of 4 learn 4 of them; one pass is --steps {ceil(count / 4)}" in said
    assert "summary_tokens" not in said
    fold(tmp_path / "whole", sft={"tasks": 4, "batch_size": 4}, rollout={"context": "whole", "context_budget": None})
    assert "one pass" not in " ".join("".join(capsys.readouterr()).split())
