"""Two processes of the learner and two vLLM servers, one of each killed on the way: the usual reward.

These really run vLLM: `make vllm`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
from agentrl.models.source import locate_model

pytestmark = pytest.mark.vllm
SETTINGS = (
    "--env math-tools --steps 40 --eval.every 0 --eval.final_tasks 128 --run.save_every 2 --learner.rank_timeout_s 120 "
    "--engine server --engine.weight_sync_timeout_s 60 --players 2"
)


def start(folder: Path, urls: list[str], log: Path) -> subprocess.Popen[bytes]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "3"]
    words = [*launch, "-m", "agentrl", "train", *SETTINGS.split(), "--engine.urls", ",".join(urls)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *words, "--run.dir", str(folder)], stdout=out, stderr=out, env=environment
        )


def find_rank(process: subprocess.Popen[bytes], rank: int) -> int:
    """Find the process of a rank among torchrun's children."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    word = f"RANK={rank}".encode()
    return next(int(pid) for pid in children if word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def find_player(folder: Path) -> int:
    """Find a player of the run: a child of the process that rolls out."""
    rank = next(pid for pid in list_processes(str(folder)) if b"RANK=0" in read(pid, "environ"))
    children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
    return next(int(pid) for pid in children if b"player" in read(int(pid), "cmdline"))


def list_processes(word: str) -> list[int]:
    """List the processes whose command line has a word."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if word.encode() in b" ".join(read(pid, "cmdline"))]


def read(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:
        return []


def count_steps(folder: Path) -> int:
    """Count the steps of a run so far."""
    metrics = folder / "metrics.jsonl"
    return sum('"step"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for(steps: int, folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 900
    while count_steps(folder) < steps and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)


def test_one_of_each_is_killed_and_the_run_comes_to_the_usual_reward(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    one, two = (VLLMServer(ServerSettings(locate_model("nano"))) for _ in range(2))
    with one.wait(), two.wait():
        process = start(run, [one.url, two.url], log)
        again: VLLMServer | None = None
        try:
            wait_for(2, run, process)
            os.kill(two.pid, signal.SIGKILL)
            wait_for(4, run, process)
            two.close()
            again = VLLMServer(ServerSettings(locate_model("nano"), port=two.port))
            while f"{two.url} is back" not in log.read_text() and process.poll() is None:  # it starts for a minute
                time.sleep(0.2)
            wait_for(9, run, process)
            os.kill(find_player(run), signal.SIGKILL)
            wait_for(12, run, process)
            pid = find_rank(process, 1)
            os.kill(pid, signal.SIGKILL)
            assert process.wait(1200) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
            if again is not None:
                again.close()
    told, summary = log.read_text(), json.loads((run / "summary.json").read_text())
    print("\n" + told)
    assert "going on after step" in told
    assert f"{two.url} is back" in told
    assert summary["reward_after"] > summary["reward_before"] + 0.4
    print(f"\n{summary['reward_before']:.3f} -> {summary['reward_after']:.3f}")
