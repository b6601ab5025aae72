"""Training from Python: what it leaves behind, and that it is the same path for one turn and for many."""

from __future__ import annotations

import itertools
import json
import re
from io import StringIO
from math import exp
from pathlib import Path
from typing import Any

import agentrl_envs
import pyarrow.parquet as pq
import pytest
import torch

from agentrl import Env, Reply, Step, ToolEnv, Trajectory, UserError, evaluate, train
from agentrl.cli.output import Console
from agentrl.cli.summary import print_summary
from agentrl.errors import ProcessLostError
from agentrl.evaluation.measurement import Evaluation
from agentrl.learner.distributed import ProcessGroup
from agentrl.models.policy import load_policy
from agentrl.training import train as training
from agentrl.training.callbacks import Callback
from agentrl.training.summary import _find_telling
from agentrl.types import Observation
from agentrl.view.report import render_report
from agentrl.view.store import Store

DATA = Path(agentrl_envs.__file__).parent / "data"
SMALL: dict[str, Any] = {
    "steps": 2,
    "rollout": {"tasks_per_step": 4, "group_size": 4},
    "eval": {"final_tasks": 8, "every": 1, "tasks": 4},
}


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("math-tools", run={"dir": str(tmp_path_factory.mktemp("runs") / "run")}, **SMALL).summary


def rows(summary: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(f"{summary['run_dir']}/trajectories/{name}.parquet").to_pylist()
    return found


def test_every_trained_token_is_one_the_engine_sampled(summary: dict[str, Any]) -> None:
    tokenizer = load_policy("nano").tokenizer
    for row in rows(summary, "train-000001"):
        authors = [s["author"] for s in row["segments"]]
        assert authors[0] == "prompt"
        assert authors[1::2] == ["model"] * len(authors[1::2])
        for segment in row["segments"]:
            sampled = segment["author"] == "model"
            assert (segment["logprobs"] is not None) == sampled
            if sampled:
                assert len(segment["logprobs"]) == len(segment["token_ids"])
                assert set(segment["versions"]) == {0}
        said = tokenizer.decode([t for s in row["segments"] for t in s["token_ids"]])
        for message in json.loads(row["messages"]):
            assert message["content"] in said


def test_a_correction_that_drops_long_rows_is_warned_of(tmp_path: Path) -> None:
    rollout = SMALL["rollout"] | {"max_tokens": 400}
    settings = SMALL | {"steps": 1, "rollout": rollout, "learner": {"importance_sampling_mode": "sequence_mask"}}
    with pytest.warns(UserWarning, match="sequence_mask leaves out whole rows.*geometric_mask goes by the mean"):
        train("math-tools", run={"dir": str(tmp_path / "run")}, **settings)


def test_versions_count_the_updates(summary: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in Path(summary["metrics"]).read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "reward" in line}
    second = rows(summary, "train-000002")
    versions = {v for r in second for s in r["segments"] for v in s["versions"] or []}
    assert versions == {int(steps[1]["policy_version"])}


def test_the_engine_and_the_learner_agree_on_logprobs(summary: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in Path(summary["metrics"]).read_text().splitlines()]
    differences = [v for line in lines if (v := line.get("sampling/sampling_logp_difference/max")) is not None]
    assert differences
    assert max(differences) < 1e-4


def test_the_learners_logprobs_are_kept_of_what_it_trained(summary: dict[str, Any]) -> None:
    """On-policy they are the engine's, and those of the model's own forward pass."""
    model, trained = load_policy("nano").model, 0
    for row in rows(summary, "train-000001"):
        own = [s for s in row["segments"] if s["author"] == "model"]
        assert all(s["learner_logprobs"] is None for s in row["segments"] if s["author"] != "model")
        assert all((s["learner_logprobs"] is not None) == bool(row["advantage"]) for s in own)
        if not row["advantage"]:
            continue
        ids = torch.tensor([[t for s in row["segments"] for t in s["token_ids"]]])
        with torch.no_grad():
            logp = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor([s["author"] == "model" for s in row["segments"] for _ in s["token_ids"]])[1:]
        learner = torch.tensor([p for s in own for p in s["learner_logprobs"]])
        engine = torch.tensor([p for s in own for p in s["logprobs"]])
        torch.testing.assert_close(learner, logp[mask], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close((learner - engine).exp(), torch.ones_like(engine), atol=1e-4, rtol=0)
        trained += len(learner)
    lines = [json.loads(line) for line in Path(summary["metrics"]).read_text().splitlines()]
    assert trained == next(line["trained_tokens"] for line in lines if line["step"] == 1 and "trained_tokens" in line)


def test_played_ahead_the_learners_logprobs_are_others(tmp_path: Path) -> None:
    settings = SMALL | {"rollout": SMALL["rollout"] | {"max_staleness": 1}, "eval": {"final_tasks": 2, "every": 0}}
    found = train("math-tools", run={"dir": str(tmp_path / "run")}, **settings, learner={"lr": 1e-3}).summary
    fresh, stale = ([s for r in rows(found, f"train-00000{n}") for s in r["segments"]] for n in (1, 2))
    (first, second) = (
        [
            exp(a - b)
            for s in segments
            for a, b in zip(s["learner_logprobs"] or (), s["logprobs"] if s["learner_logprobs"] else (), strict=True)
        ]
        for segments in (fresh, stale)
    )
    assert all(v == 0 for s in stale for v in s["versions"] or ())  # learned from at version 1
    assert max(abs(r - 1) for r in first) < 1e-4
    assert max(abs(r - 1) for r in second) > 0.01


def test_groups_share_a_task_and_their_advantages_sum_to_nothing(summary: dict[str, Any]) -> None:
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows(summary, "train-000001"):
        groups.setdefault(row["task"], []).append(row)
    assert len(groups) == 4
    for members in groups.values():
        assert len({json.loads(m["messages"])[1]["content"] for m in members}) == 1
        assert sum(m["advantage"] for m in members) == pytest.approx(0.0, abs=1e-6)


def test_the_final_model_loads_and_measures_the_same(summary: dict[str, Any], tmp_path: Path) -> None:
    found = evaluate("math-tools", summary["run_dir"], tasks=8, greedy=True, out=str(tmp_path / "eval"))
    assert found.reward == summary["greedy_after"]


def test_a_dataset_is_the_same_path_with_one_turn(tmp_path: Path) -> None:
    def brief(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 / (1 + len(text)) for text in completions]

    settings = {"data": str(DATA / "symbols.jsonl"), "rewards": ["accuracy", brief], "reward_weights": [1.0, 0.1]}
    summary = train("prompts", env_args=settings, run={"dir": str(tmp_path / "run")}, **SMALL).summary
    config = Path(summary["run_dir"], "config.toml").read_text()
    assert "# given in Python, so not written here: env.rewards" in config
    assert "symbols.jsonl" in config
    for row in rows(summary, "train-000001"):
        assert [s["author"] for s in row["segments"]] == ["prompt", "model"]
        parts = {r["name"]: r["value"] for r in row["rewards"]}
        assert parts.keys() == {"accuracy", "brief"}
        assert row["reward"] == pytest.approx(parts["accuracy"] + 0.1 * parts["brief"])


@pytest.mark.slow
def test_a_tool_that_times_out_teaches_nothing_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import anyio\n"
        "from agentrl import tool\n"
        "from agentrl_envs.math_tools import MathTools\n"
        "from agentrl_tools.calculator import calculator as real\n\n\n"
        "async def down() -> None:\n"
        "    raise OSError('no route')\n\n\n"
        "@tool(timeout_s=0.4, max_consecutive_failures=None, health_check=down)\n"
        "async def calculator(expression: str) -> str:\n"
        '    """Compute."""\n'
        "    if len(expression) % 2:\n"
        "        await anyio.sleep(60)\n"
        "    return await real(expression=expression)\n\n\n"
        "class Mine(MathTools):\n"
        "    tools = (calculator,)\n"
    )
    more = SMALL | {"rollout": {"tasks_per_step": 8, "group_size": 8}, "eval": {"final_tasks": 32, "every": 0}}
    summary = train(f"{tmp_path / 'mine.py'}:Mine", run={"dir": str(tmp_path / "run")}, **more).summary
    assert summary["faults"]["tool_timeout"] > 0
    faulted = [r for r in rows(summary, "train-000001") if r["fault"]]
    assert faulted
    assert {r["fault"] for r in faulted} == {"tool_timeout"}
    assert {r["reward"] for r in faulted} == {None}
    assert {(r["credit"], r["advantage"], r["weight"]) for r in faulted} == {("fault", None, None)}


def test_a_stall_and_who_blocks_the_loop_are_kept_with_their_step(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "import anyio\n"
        "from agentrl_envs.math_tools import MathTools\n\n\n"
        "class Slow(MathTools):\n"
        "    played = 0\n\n"
        "    async def score(self, trajectory):\n"
        "        Slow.played += 1\n"
        "        if Slow.played == 9:  # the first of training: four tasks were measured, sampled and greedy\n"
        "            time.sleep(0.6)\n"
        "            await anyio.sleep(1.2)\n"
        "        return await super().score(trajectory)\n"
    )
    small: dict[str, Any] = {
        "steps": 1,
        "rollout": {"tasks_per_step": 2, "group_size": 2, "stall_timeout_s": 0.3},
        "eval": {"final_tasks": 4, "every": 0},
    }
    heard: list[str] = []

    class Listening(Callback):
        def on_message(self, text: str) -> None:
            heard.append(text)

    train(f"{tmp_path / 'slow.py'}:Slow", run={"dir": str(tmp_path / "run")}, callbacks=[Listening()], **small)
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    stall = re.compile(r"nothing has gone on for 0\.3 s: \d+ episodes? waits? on ")
    assert any(stall.match(t["text"]) for t in told if t["step"] == 1)
    blocked = next(t for t in told if "the event loop was held up for" in t["text"] and "Slow.score" in t["text"])
    assert blocked["step"] == 1
    assert [t["text"] for t in told] == heard


def test_episodes_longer_than_the_context_stop_with_a_reason(tmp_path: Path) -> None:
    more = SMALL | {"engine": {"max_model_len": 60}}
    summary = train("math-tools", run={"dir": str(tmp_path / "run")}, **more).summary
    stops = {r["stop"] for r in rows(summary, "train-000001")}
    assert "max_tokens" in stops
    for row in rows(summary, "train-000001"):
        ends = list(itertools.accumulate(len(s["token_ids"]) for s in row["segments"]))
        sampled = [end for end, s in zip(ends, row["segments"], strict=True) if s["author"] == "model"]
        assert max(sampled, default=0) <= 60


@pytest.mark.slow
def test_a_dataset_smaller_than_asked_is_measured_whole(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"Reverse the digits of {n}.", "solution": str(n)[::-1]}) for n in range(123, 143)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = {"data": str(tmp_path / "rows.jsonl")}
    summary = train("prompts", env_args=settings, run={"dir": str(tmp_path / "run")}, **SMALL).summary
    assert summary["after"]["sampled"]["episodes"] == 2


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"group_sizes: unknown setting; did you mean 'rollout.group_size'"):
        train("math-tools", group_sizes=8)


def test_a_further_process_says_that_the_first_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*arguments: Any) -> None:
        raise RuntimeError("[../gloo/pair.cc:525] Connection closed by peer [127.0.0.1]:7")

    monkeypatch.setattr(training, "init_process_group", lambda timeout_s: ProcessGroup(1, 2))
    monkeypatch.setattr(training, "_follow", lose)
    with pytest.raises(ProcessLostError, match="another one of the learner's processes is gone"):
        train("math-tools", **SMALL)


class Closed(Env):
    """No episode of it can be played to its end, of one split or of both."""

    def __init__(self, splits: str = "train,test") -> None:
        super().__init__()
        self.splits = splits.split(",")

    async def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        if options["split"] in self.splits:
            raise ConnectionError("the database refused the connection")
        return f"Say {seed}.", {}

    async def step(self, reply: Reply) -> Step:
        return Step("", 0.0, True, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"said": 0.0}


@pytest.mark.parametrize(("splits", "file"), [("train,test", "test-000000"), ("train", "train-000001")])
def test_episodes_of_which_none_could_be_scored_are_kept_to_be_looked_at(
    splits: str, file: str, tmp_path: Path
) -> None:
    settings = SMALL | {"steps": 1, "eval": {"final_tasks": 2, "every": 0}, "run": {"dir": str(tmp_path / "run")}}
    with pytest.raises(UserError, match="could be scored"):
        train(Closed, env_args={"splits": splits}, **settings)
    kept = pq.read_table(tmp_path / "run" / "trajectories" / f"{file}.parquet").to_pylist()
    assert kept
    assert {row["fault"] for row in kept} == {"env_reset"}


class Turning(ToolEnv):
    """Of the held-out tasks the even ones can be scored before the training, the odd ones after it."""

    trained = False

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        self.held_out = (options or {}).get("split") == "test"
        type(self).trained |= not self.held_out
        self.scored = not self.held_out or seed % 2 == type(self).trained
        return self.ask("Say a word."), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"r": float(sum(trajectory.token_ids) % 2) if self.scored else None}


def test_where_no_task_was_scored_both_times_there_is_no_change_to_tell(tmp_path: Path) -> None:
    """summary.json used to hold NaN, which is no JSON, and the terminal printed it."""
    Turning.trained = False
    small: dict[str, Any] = {
        "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 4},
        "eval": {"every": 0, "final_tasks": 6},
    }
    summary = train(Turning, steps=1, run={"dir": str(tmp_path / "run")}, **small).summary

    def refuse(word: str) -> None:
        raise AssertionError(word)

    written = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
    assert written["difference"] == summary["difference"] == {"sampled": None, "greedy": None}
    assert (written["before"]["sampled"]["tasks"], written["before"]["sampled"]["unscored"]) == (3, 3)
    said = StringIO()
    print_summary(Console(file=said, width=200), written)
    assert "change sampled and greedy: no task was scored both before and after" in said.getvalue()
    store = Store(tmp_path / "run")
    store.refresh()
    assert re.search(r"\bnan\b", render_report(store)) is None


@pytest.mark.slow
def test_the_task_that_is_shown_was_tried_both_times_and_its_rows_are_those_of_each_evaluation(tmp_path: Path) -> None:
    """A run that goes on may have fewer tasks at its end, and other trials."""
    run, more = {"dir": str(tmp_path / "run"), "resume": True}, {"rollout": SMALL["rollout"]}
    train("math-tools", steps=1, run=run, eval={"every": 0, "final_tasks": 8}, **more)
    summary = train("math-tools", steps=2, run=run, eval={"every": 0, "final_tasks": 5, "trials": 2}, **more).summary
    for when in ("before", "after"):
        name, _, row = summary[f"episode_{when}"].partition(":")
        split, _, step = name.partition("-")
        shown = rows(summary, f"{split}-{int(step):06d}")[int(row)]
        assert (shown["sample"], json.loads(shown["messages"])) == (0, summary[f"conversation_{when}"])
    assert summary["conversation_before"][1] == summary["conversation_after"][1]


def test_a_task_that_got_worse_is_shown_before_one_that_was_not_tried_again() -> None:
    def found(rewards: dict[int, float]) -> Evaluation:
        return Evaluation(None, None, {}, {}, rewards, dict.fromkeys(rewards, ()))

    assert _find_telling(found({0: 1.0, 1: 0.0}), found({0: 0.5})) == 0


def test_the_age_of_tokens_that_are_masked_is_in_no_staleness(tmp_path: Path) -> None:
    """All episodes run out of tokens and are left out: nothing was learned from, old or new."""
    short = {"tasks_per_step": 2, "group_size": 2, "max_tokens": 3}
    more: dict[str, Any] = {"rollout": short, "eval": {"every": 0, "final_tasks": 1}}
    run = {"dir": str(tmp_path / "run")}
    train("math-tools", steps=1, run=run, learner={"mask_stop_reasons": ["max_tokens"]}, **more)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = (line for line in lines if "step_time" in line)
    assert step["episodes/masked"] == step["episodes"] == 4
    assert not [name for name in step if name.startswith("staleness/")]
