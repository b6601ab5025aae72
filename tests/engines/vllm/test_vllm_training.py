"""Training with vLLM learns as with the embedded engine, in process and with servers of which one dies on the way.

These really run vLLM: `make vllm`.
"""

import gc
import os
import signal
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("vllm")

from agentrl import train
from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
from agentrl.models.source import locate_model
from agentrl.training.callbacks import Callback

pytestmark = [
    pytest.mark.vllm,
    # A killed server's connections are left to the garbage collector by the HTTP client: in this test or the next one.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS: dict[str, Any] = {
    "steps": 12,
    "rollout": {"tasks_per_step": 8},
    "eval": {"every": 0, "final_tasks": 128},
    "learner": {"lr_scheduler": "constant"},
}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The reward that the embedded engine's training comes to."""
    folder = tmp_path_factory.mktemp("embedded") / "run"
    return float(train("math-tools", run={"dir": str(folder)}, **SETTINGS).summary["reward_after"])


def test_in_process(embedded: float, tmp_path: Path) -> None:
    summary = train("math-tools", engine="vllm", run={"dir": str(tmp_path / "run")}, **SETTINGS).summary
    check(summary, embedded)


def test_with_servers_of_which_one_dies_and_comes_back(embedded: float, tmp_path: Path) -> None:
    one, two = (VLLMServer(ServerSettings(locate_model("nano"))) for _ in range(2))
    again: list[VLLMServer] = []

    class Killer(Callback):
        def on_step_end(self, step: int, values: Any) -> None:
            if step == 3:  # while the next step is played
                threading.Timer(0.3, os.kill, (two.pid, signal.SIGKILL)).start()
            if step == 5:
                two.close()
                again.append(VLLMServer(ServerSettings(locate_model("nano"), port=two.port)))

    with one.wait(), two.wait():
        try:
            engine = {"name": "server", "urls": [one.url, two.url]}
            summary = train(
                "math-tools", engine=engine, callbacks=[Killer()], run={"dir": str(tmp_path / "run")}, **SETTINGS
            ).summary
        finally:
            for server in again:
                server.close()
    assert again
    check(summary, embedded)
    gc.collect()  # here, where it is expected
    deadline = time.monotonic() + 60
    while any(map(is_there, (one, two, *again))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_there, (one, two, *again)))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "launched"])
def test_an_adapter(engine: str, tmp_path: Path) -> None:
    """Its matrices alone are sent: with servers their base weights are those that they were started with."""
    run = {"dir": str(tmp_path / "run")}
    learner = {"lr": 5e-3, "lr_scheduler": "constant"}
    summary = train("math-tools", engine=engine, run=run, lora={"rank": 8}, **SETTINGS | {"learner": learner}).summary
    assert summary["faults"] == {}
    assert summary["reward_after"] > summary["reward_before"] + 0.3
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()
    assert fmean(differences(tmp_path / "run")) < 1e-4


def is_there(server: VLLMServer) -> bool:
    """Whether the server or a process that it started is left."""
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return False
    return True


def check(summary: dict[str, Any], embedded: float) -> None:
    assert summary["steps"] == 12
    assert summary["faults"] == {}
    errors = [summary["after"]["sampled"]["stderr"], 0.03]
    assert summary["reward_after"] == pytest.approx(embedded, abs=4 * max(errors))
    assert summary["reward_after"] > summary["reward_before"] + 0.3
    folder = Path(summary["run_dir"])
    assert fmean(differences(folder)) < 1e-5
    assert (folder / "model" / "config.json").is_file()


def differences(folder: Path) -> list[float]:
    import json

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    name = "sampling/sampling_logp_difference/mean"
    return [row[name] for row in rows if name in row]
