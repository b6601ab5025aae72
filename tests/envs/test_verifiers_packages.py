"""Two packages written after verifiers' documentation, in venvs with verifiers: they train, and are scored as it does.

The venvs are made once, below .venv-verifiers (`agentrl env add`).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet as pq
import pytest
from agentrl_envs.verifiers import _BRIDGE, Verifiers
from agentrl_envs.verifiers_venvs import add_package, find_package, list_packages

from agentrl import EnvSpec, UserError
from agentrl.cli import main
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from tests.helpers.processes import heed_interrupts

ROOT = Path(__file__).parents[2]
DATA = ROOT / ".venv-verifiers"
HELPERS = ROOT / "tests" / "helpers"
SMALL = [
    *("--rollout.tasks_per_step", "2", "--rollout.group_size", "4", "--rollout.max_tokens", "48"),
    *("--eval.final_tasks", "2", "--eval.every", "0", "--run.dir", "run"),
]
pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture(autouse=True)
def _with_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(DATA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_TEST", str(tmp_path))  # by which the processes of a test are known
    DATA.mkdir(exist_ok=True)
    with open(DATA / "lock", "w") as lock:  # tests in another process may want the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        added = {(package.name, package.source) for package in list_packages()}
        for folder in ("reverse_word", "stock_count"):
            source = HELPERS / "verifiers_packages" / folder
            if (folder.replace("_", "-"), str(source)) not in added:
                add_package(str(source))


def list_processes() -> list[str]:
    """List the commands of the processes of verifiers' venvs that this test started."""
    own, found = os.environ["AGENTRL_TEST"].encode(), []
    for folder in (Path("/proc", pid) for pid in os.listdir("/proc") if pid.isdigit()):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(DATA) in command and own in (folder / "environ").read_bytes():
                found.append(command)
        except OSError:  # it has ended
            continue
    return found


def wait_until_none_is_left() -> None:
    deadline = time.monotonic() + 30
    while (left := list_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.mark.parametrize("name", ["reverse-word", "stock-count"])
def test_it_trains_a_step(name: str) -> None:
    assert main(["train", "--env", f"verifiers:{name}", "--steps", "1", *SMALL]) == 0
    rows: list[dict[str, Any]] = pq.read_table("run/trajectories/train-000001.parquet").to_pylist()
    assert [row["fault"] for row in rows] == [None] * 8
    assert all(sum(s["author"] == "model" for s in row["segments"]) >= 1 for row in rows)
    parts = {"reverse-word": {"likeness", "brief"}, "stock-count": {"right"}}[name]
    assert all({part["name"] for part in row["rewards"]} == parts for row in rows)
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    own = {"reverse-word": "reply_length", "stock-count": "turns"}[name]
    assert any(key.endswith(own) for step in steps for key in step)
    wait_until_none_is_left()


def evaluate_with_verifiers(name: str, config: dict[str, Any], episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = {"taskset": name, "config": config, "harnesses": str(_BRIDGE.parent), "episodes": episodes}
    words = [str(find_package(name).python), str(HELPERS / "verifiers_evaluation.py")]
    done = subprocess.run(words, input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


WIRE_CALL = {"id": "c", "type": "function", "function": {"name": "store_count", "arguments": '{"thing": "nails"}'}}
CASES: list[tuple[str, list[str], list[dict[str, Any]]]] = [  # a package, what the engine says, the same as messages
    ("reverse-word", ["abab"], [{"content": "abab"}]),
    ("reverse-word", ["It is baba, I think; or not."], [{"content": "It is baba, I think; or not."}]),
    ("reverse-word", [""], [{"content": ""}]),
    ("stock-count", ["12"], [{"content": "12"}]),
    (
        "stock-count",
        [call("store_count", thing="nails"), "There are 12 of them"],
        [{"content": None, "tool_calls": [WIRE_CALL]}, {"content": "There are 12 of them"}],
    ),
    (
        "stock-count",
        [call("store_count", thing="nails"), "none"],
        [{"content": None, "tool_calls": [WIRE_CALL]}, {"content": "none"}],
    ),
]


@pytest.mark.parametrize("name", ["reverse-word", "stock-count"])
async def test_rewards_and_metrics_are_those_of_verifiers_own_evaluation(name: str) -> None:
    cases = [case for case in CASES if case[0] == name]
    ours = []
    spec = EnvSpec(Verifiers, name=name)
    async with spec.open(), Gateway(None).open() as gateway:
        task = spec.shared.tasks["train"].index(("train", 0))
        for _, script, _ in cases:
            rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer())
            rollout.begin = gateway.begin
            played = await rollout.episode(task)
            assert played.fault is None, played.fault
            assert len(played.contexts) == 1
            own = {k: v for k, v in played.metrics.items() if not k.startswith("agent/")}
            ours.append({"rewards": dict(played.rewards), "reward": played.reward, "metrics": own})
    episodes = [{"task": 0, "turns": turns} for _, _, turns in cases]
    theirs = await anyio.to_thread.run_sync(evaluate_with_verifiers, name, {}, episodes)
    assert ours == theirs
    assert len({r["reward"] for r in ours}) > 1
    wait_until_none_is_left()


@pytest.mark.long
async def test_sixty_four_at_once_and_cancelled_ones_leave_nothing() -> None:
    spec = EnvSpec(Verifiers, name="stock-count")
    engine = ScriptedEngine(lambda session, turn: "12" if turn else call("store_count", thing="nails"))
    async with spec.open(), Gateway(None).open() as gateway:
        rollout = Rollout(spec, engine, ByteRenderer())
        rollout.begin = gateway.begin
        task = spec.shared.tasks["train"].index(("train", 0))
        groups = await rollout.batch([task] * 8, 8)
        assert [t.reward for g in groups for t in g.trajectories] == [1.0] * 64
        assert {t.turns for g in groups for t in g.trajectories} == {2}
        engine.latency_s = 600.0
        with anyio.move_on_after(3.0):
            await rollout.batch([task] * 2, 8)
        engine.latency_s = 0.0
        assert (await rollout.episode(task)).reward == 1.0
    wait_until_none_is_left()


@pytest.mark.long
async def test_a_server_that_is_killed_in_mid_episode_is_a_fault_and_begins_anew() -> None:
    spec = EnvSpec(Verifiers, name="stock-count")
    engine = ScriptedEngine(["12"], latency_s=3.0)
    async with spec.open(), Gateway(None).open() as gateway:
        rollout = Rollout(spec, engine, ByteRenderer())
        rollout.begin = gateway.begin
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_kill_worker, spec)
            lost = await rollout.episode(0)
        assert lost.fault is not None
        assert "its worker process ended" in lost.fault.message
        engine.latency_s = 0.0
        assert (await rollout.episode(0)).fault is None
    wait_until_none_is_left()


async def test_who_is_cancelled_while_it_starts_leaves_nothing() -> None:
    for seconds in (1.0, 5.0, 8.0):
        with anyio.move_on_after(seconds):
            async with EnvSpec(Verifiers, name="stock-count").open():
                await anyio.sleep_forever()
    wait_until_none_is_left()


async def _kill_worker(spec: EnvSpec) -> None:
    await anyio.sleep(1.5)
    os.kill(spec.shared._workers[0]._process.pid, signal.SIGKILL)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.long
def test_a_run_that_is_interrupted_or_killed_leaves_no_processes(by: signal.Signals) -> None:
    words = [sys.executable, "-m", "agentrl", "train", "--env", "verifiers:stock-count", "--steps", "1000", *SMALL]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_interrupts
    ) as run:
        assert run.stdout is not None
        while not run.stdout.readline().startswith("step 1/"):
            assert run.poll() is None
        assert list_processes()
        run.send_signal(by)
        run.stdout.read()
        assert run.wait(60) == (130 if by is signal.SIGINT else -signal.SIGKILL)
    wait_until_none_is_left()


async def test_a_reward_that_raises_ends_the_run_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("async def likeness(trace):\n    raise KeyError('no such answer')\n")
    rewards = {"likeness": {"fn": f"{tmp_path}/hooks.py:likeness"}}
    spec = EnvSpec(Verifiers, name="reverse-word", config={"taskset": {"task": {"rewards": rewards}}})
    async with spec.open(), Gateway(None, 16).open() as gateway:
        rollout = Rollout(spec, ScriptedEngine(["x"]), ByteRenderer())
        rollout.begin = gateway.begin
        with pytest.raises(
            UserError, match=r"in 8 of the last .*TaskError: task ReverseWordTask scoring: KeyError: 'no such answer'"
        ):
            await rollout.batch([0, 1], 8)


MODULES = {
    "def load_environment(**kwargs):\n    pass\n": "verifiers before its tasksets",
    "import verifiers as vf\n\nclass Mine(vf.SingleTurnEnv):\n    pass\n": "verifiers before its tasksets",
    "import verifiers.v1 as vf\n__all__ = ['Mine']\n\nclass Mine(vf.Taskset[vf.Task, vf.TasksetConfig]):\n"
    "    def load(self):\n        return [vf.Task(vf.TaskData(prompt='hi'), self.config.task)]\n": "Task has no reward",
    "raise RuntimeError('no licence')\n": "cannot be loaded: RuntimeError: no licence",
}


@pytest.mark.parametrize(("source", "sentence"), MODULES.items(), ids=range(len(MODULES)))
def test_a_package_that_cannot_be_played_is_a_sentence(source: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "some_package.py").write_text(source)
    given: dict[str, Any] = {
        "taskset": "some-package",
        "config": {},
        "eval_config": None,
        "harness": "",
        "runtime": "subprocess",
    }
    words = [str(find_package("reverse-word").python), str(_BRIDGE), json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL, env=environment
    )
    assert sentence in json.loads(done.stdout)["refused"]


def test_a_package_that_is_not_on_the_index_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "add", "verifiers:agentrl-no-such-package-of-verifiers"]) == 2
    said = capsys.readouterr().err
    assert "'agentrl-no-such-package-of-verifiers' cannot be installed: No matching distribution found" in said
    assert "agentrl-no-such-package-of-verifiers" not in [package.name for package in list_packages()]
