"""Runs with router replay: a small mixture of experts learns by what the engine's routers chose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from agentrl import UserError, train
from agentrl.cli.dispatch import main
from agentrl.errors import ConfigError
from agentrl.models import policy
from agentrl.resources import build_sampler
from agentrl.settings.loader import build_config, read_overrides
from tests.helpers.moe import EXPERTS, TOP_K, write_moe
from tests.helpers.vllm_server import fake_vllm

SMALL: dict[str, Any] = {
    "steps": 2,
    "verbose": False,
    "rollout": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 48},
    "eval": {"every": 0, "final_tasks": 1},
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_moe(tmp_path_factory.mktemp("model") / "moe"))


def read_steps(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.mark.slow
def test_the_command_trains_and_says_what_it_replays(moe: str, tmp_path: Path) -> None:
    words = ["--env", "math-tools", "--model", moe, "--engine", "transformers", "--steps", "2"]
    few = ["--rollout.tasks_per_step", "2", "--rollout.group_size", "4", "--rollout.max_tokens", "48"]
    ends = ["--eval.every", "0", "--eval.final_tasks", "1", "--run.dir", str(tmp_path / "run")]
    assert main(["train", *words, *few, *ends, "--actor_rollout_ref.actor.router_replay.mode", "R3"]) == 0
    steps = read_steps(tmp_path / "run")
    assert steps
    for row in steps:
        assert row["router/replay_disagreement"] == 0.0  # the same weights, in the same precision
        assert row["router/replayed"] > 0.9
        assert row["sampling/sampling_logp_difference/max"] < 1e-3
        assert row["aux_loss"] > 0.0  # the balancing loss goes on beside it
    assert "router_replay = true" in (tmp_path / "run/config.toml").read_text()
    kept = pq.read_table(tmp_path / "run/trajectories/train-000001.parquet").to_pylist()
    assert "routed_experts" not in kept[0]["segments"][0]  # as docs/run-folder.md says


@pytest.mark.slow
def test_in_bfloat16_it_brings_the_learner_nearer_to_the_engine(moe: str, tmp_path: Path) -> None:
    apart = {}
    for replays in (False, True):
        run = tmp_path / str(replays)
        settings = SMALL | {"steps": 1, "learner": {"router_replay": replays}, "run": {"dir": str(run)}}
        train("math-tools", model=moe, engine={"name": "transformers", "dtype": "bfloat16"}, seed=3, **settings)
        (row,) = read_steps(run)
        apart[replays] = row["sampling/sampling_logp_difference/mean"]
        assert ("router/replay_disagreement" in row) == replays
    assert row["router/replay_disagreement"] > 0.0
    assert apart[True] < apart[False]


@pytest.mark.slow
def test_a_run_that_overlaps_is_resumed_with_the_experts_of_groups_in_flight(moe: str, tmp_path: Path) -> None:
    """Groups that wait in a checkpoint bring their experts: without them less would be replayed."""
    run = tmp_path / "run"
    rollout = SMALL["rollout"] | {"max_staleness": 2}
    settings = SMALL | {"rollout": rollout, "learner": {"router_replay": True, "num_iterations": 2}}
    train("math-tools", model=moe, engine={"name": "transformers"}, run={"dir": str(run), "save_every": 1}, **settings)
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0
    steps = read_steps(run)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["router/replayed"] > 0.9 for row in steps)


@pytest.mark.slow
def test_players_bring_the_experts_of_their_episodes(moe: str, tmp_path: Path) -> None:
    words = ["--env", "math-tools", "--model", moe, "--engine", "transformers", "--steps", "1", "--players", "1"]
    few = ["--rollout.tasks_per_step", "2", "--rollout.group_size", "4", "--rollout.max_tokens", "48"]
    ends = ["--eval.every", "0", "--eval.final_tasks", "1", "--run.dir", str(tmp_path / "run")]
    assert main(["train", *words, *few, *ends, "--learner.router_replay", "true"]) == 0
    (row,) = read_steps(tmp_path / "run")
    assert row["router/replayed"] > 0.9
    assert row["router/replay_disagreement"] == 0.0


@pytest.mark.slow
def test_servers_say_the_experts_over_http(moe: str, tmp_path: Path) -> None:
    """The stand-in computes each token's whole row again: few and short turns."""
    with fake_vllm(AutoModelForCausalLM.from_pretrained(moe)) as server:
        server.returns_experts, server.max_context = True, 1024
        few = {"rollout": {"tasks_per_step": 1, "group_size": 2, "max_tokens": 6}}
        settings = SMALL | few | {"steps": 1, "learner": {"router_replay": True}, "run": {"dir": str(tmp_path / "run")}}
        train("math-tools", model=moe, engine={"name": "server", "urls": [server.url]}, **settings)
    (row,) = read_steps(tmp_path / "run")
    assert row["router/replayed"] > 0.9
    assert row["router/replay_disagreement"] == 0.0


def test_a_dense_model_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "math-tools", "--learner.router_replay", "true", "--run.dir", str(tmp_path / "run")]
    assert main(["train", *words, "--engine", "transformers"]) == 2
    assert "learner.router_replay: the experts of Qwen3ForCausalLM cannot be recorded" in capsys.readouterr().err


def test_demonstrations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--env", "math-tools", "--learner.router_replay", "true"]) == 2
    said = capsys.readouterr().err
    assert "router_replay is of experts that an engine chose, and nobody sampled the demonstrations" in said


class _Silent:
    """An engine of somebody's that says nothing of routers."""

    version, capacity, max_context, meter = 0, 1, 64, None

    def __getattr__(self, name: str) -> Any:
        return None


def silent(model: Any, config: Any) -> Any:
    return _Silent()


def test_an_engine_that_says_nothing_of_routers_is_refused_where_a_run_learns_by_them() -> None:
    words = ["--env", "math-tools", "--engine", "tests.training.test_router_replay_runs:silent"]
    config = build_config(read_overrides([*words, "--learner.router_replay", "true"]))
    loaded = policy.load_policy("nano")
    with pytest.raises(ConfigError, match=r"router_replay: engine .*silent does not say which experts its routers"):
        build_sampler(config, loaded, learns=True)
    build_sampler(config, loaded)  # an evaluation with a run's settings


def test_the_small_mixture_is_one(moe: str) -> None:
    config = json.loads((Path(moe) / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (EXPERTS, TOP_K)
    assert issubclass(ConfigError, UserError)
