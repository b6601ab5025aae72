"""verifiers packages: the wire to their bridge, splits, rewards and errors, with a bridge that has no verifiers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from agentrl_envs import verifiers
from agentrl_envs.verifiers import Verifiers, _split_tasks

from agentrl import ContractError, EnvSpec, UserError
from agentrl.cli import main
from agentrl.errors import ConfigError
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine
from agentrl.types import Stop

pytestmark = pytest.mark.anyio
BRIDGE = verifiers._BRIDGE
FAKE = Path(__file__).parents[1] / "helpers" / "fake_verifiers.py"


@pytest.fixture(autouse=True)
def _fake_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verifiers, "_BRIDGE", FAKE)
    monkeypatch.setattr(verifiers, "find_package", lambda name: SimpleNamespace(name=name, python=Path(sys.executable)))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


@asynccontextmanager
async def open_rollout(engine: Any, settings: Any = None, **limits: Any) -> AsyncIterator[Rollout]:
    spec = EnvSpec(Verifiers, name="fake", **(settings or {}))
    async with spec.open(), Gateway(None, 16).open() as gateway:
        rollout = Rollout(spec, engine, ByteRenderer(), EpisodeLimits(**limits))
        rollout.begin = gateway.begin
        yield rollout


def only(*tasks: str) -> dict[str, Any]:
    """Settings of a package that has these tasks to train on."""
    return {"config": {"tasks": tasks, "eval_tasks": ["say held out"]}}


async def test_rewards_and_metrics_are_the_packages_own() -> None:
    async with open_rollout(ScriptedEngine(["3"])) as rollout:
        done = await rollout.episode(3)
    assert (done.rewards, done.weights) == ({"right": 1.0, "brief": 0.5}, {"right": 1.0, "brief": 0.5})
    assert (done.reward, done.turns, done.stop, done.fault) == (1.25, 1, Stop.TERMINATED, None)
    assert done.metrics["length"] == 1.0
    assert done.messages[0]["content"] == "say 3"
    assert done.info["verifiers"] == [{"seat": "agent", "stop": "done"}]


async def test_sixty_four_at_once_in_two_processes() -> None:
    async with open_rollout(ScriptedEngine(["3"]), {"workers": 2}) as rollout:
        groups = await rollout.batch([0, 1, 2, 3, 4, 5, 6, 7], 8)
        assert [t.fault for g in groups for t in g.trajectories] == [None] * 64
        assert [g.trajectories[0].rewards["right"] for g in groups] == [0, 0, 0, 1, 0, 0, 0, 0]


async def test_a_process_that_dies_is_the_worlds_fault_and_another_one_begins() -> None:
    async with open_rollout(ScriptedEngine(["1"]), only("die", "say 1")) as rollout:
        dead = await rollout.episode(0)
        assert dead.fault is not None
        assert (dead.fault.kind, dead.fault.provoked) == ("agent", False)
        assert "verifiers: its worker process ended" in dead.fault.message
        assert (await rollout.episode(1)).rewards["right"] == 1.0


async def test_a_reward_that_raises_is_a_fault_of_which_evidence_tells_who_provoked_it() -> None:
    async with open_rollout(ScriptedEngine(["1"]), only("raise")) as rollout:
        done = await rollout.episode(0)
    assert done.fault is not None
    assert done.fault.kind == "verifiers_task"
    assert "my reward broke" in done.fault.message
    assert "in my_reward" in done.fault.message


async def test_the_same_error_in_half_of_a_step_ends_the_run() -> None:
    async with open_rollout(ScriptedEngine(["1"]), only("raise")) as rollout:
        with pytest.raises(
            UserError, match=r"by the same error in 8 .*TaskError: scoring: ValueError: my reward broke"
        ):
            await rollout.batch([0, 0], 8)


async def test_an_error_of_the_world_counts_before_one_of_the_agent() -> None:
    async with open_rollout(ScriptedEngine(["1"]), only("both")) as rollout:
        done = await rollout.episode(0)
    assert done.fault is not None
    assert done.fault.kind == "verifiers_task"


async def test_an_episode_that_runs_out_of_turns_is_scored_as_it_stands() -> None:
    async with open_rollout(ScriptedEngine(["1"]), {**only("provider"), "max_turns": 1}) as rollout:
        done = await rollout.episode(0)
    assert (done.fault, done.rewards, done.turns) == (None, {"reward": 0.0}, 1)


async def test_one_that_takes_too_long_is_cancelled() -> None:
    async with open_rollout(ScriptedEngine(["1"]), only("hang", "say 1"), episode_timeout_s=1.0) as rollout:
        assert (await rollout.episode(0)).stop is Stop.TIMEOUT
        assert not rollout.spec.shared._workers[0].waiting
        assert (await rollout.episode(1)).fault is None


async def test_several_seats_have_their_rewards_by_name_and_one_that_is_not_trained_is_refused() -> None:
    async with open_rollout(ScriptedEngine(["1"]), only("seats", "judge")) as rollout:
        assert (await rollout.episode(0)).rewards == {"first/won": 1.0, "second/won": 0.0}
        with pytest.raises(ContractError, match="has a seat that is not trained, 'judge'"):
            await rollout.episode(1)


async def test_without_the_gateway_it_says_who_plays() -> None:
    spec = EnvSpec(Verifiers, name="fake")
    async with spec.open():
        with pytest.raises(ConfigError, match="'Verifiers' plays its episodes itself, against the policy of a run"):
            await Rollout(spec, ScriptedEngine(["1"]), ByteRenderer()).episode(0)


def test_no_question_is_in_both_splits() -> None:
    rows = [f"q{n % 25}" for n in range(100)]
    splits = _split_tasks("x", {"train": rows})
    train, test = ({rows[i] for _, i in splits[split]} for split in ("train", "test"))
    assert train
    assert test
    assert not train & test
    own = _split_tasks("x", {"train": ["a", "b", "c"], "eval": ["c", "d"]})
    assert own == {"train": [("train", 0), ("train", 1)], "test": [("eval", 0), ("eval", 1)]}
    with pytest.raises(UserError, match=r"has 1 tasks, and none is left to train on .*--env\.eval_config"):
        _split_tasks("x", {"train": ["a"]})


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"refused": "it has no reward"}, "env 'verifiers:fake': it has no reward"),
        ({"ends": True}, "env 'verifiers:fake': its worker process ended as it began"),
    ],
)
async def test_who_cannot_be_played_says_why(config: dict[str, Any], sentence: str) -> None:
    spec = EnvSpec(Verifiers, name="fake", config=config)
    with pytest.raises(UserError, match=sentence):
        async with spec.open():
            pass


def test_a_venv_without_verifiers_is_refused_by_the_bridge() -> None:
    given: dict[str, Any] = {
        "taskset": "json",
        "config": {},
        "eval_config": None,
        "harness": "",
        "runtime": "subprocess",
    }
    words = [sys.executable, "-I", str(BRIDGE), json.dumps(given)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, input="")
    assert "its venv has no verifiers" in json.loads(done.stdout)["refused"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--env", "verifiers:no-such"], "To install it: agentrl env add verifiers:no-such"),
        (["env", "add", "verifiers:./no-such"], "there is no folder './no-such'"),
        (["env", "add", "verifiers:no-such.whl"], "there is no wheel 'no-such.whl'"),
        (["env", "add", "verifiers:a b c"], "is no folder, no wheel, and no name of a package"),
        (["env", "add", "verifiers:."], "its pyproject.toml has no project.name"),
        (["env", "remove", "verifiers:no-such"], "there is no such package here"),
        (["env", "add", "gym:x"], "'gym:x' is no environment that is installed so"),
        (["env", "upgrade"], "the first word is add, list or remove"),
    ],
)
def test_mistakes_of_users_are_sentences(
    words: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_data_folder_that_cannot_be_written_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert main(["env", "add", "verifiers:some-package"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "which cannot be written (Not a directory); set XDG_DATA_HOME to another folder" in said


async def test_leaving_ends_the_processes() -> None:
    async with open_rollout(ScriptedEngine(["1"]), {"workers": 2}) as rollout:
        processes = [w._process for w in rollout.spec.shared._workers]
    with anyio.fail_after(60):
        assert [await p.wait() for p in processes if p is not None] == [0, 0]
