"""Processes of the learner that are killed or stopped: torchrun begins again, and the run ends as if nothing had been.

AGENTRL_RANK_KILLS says how many are killed, and as many stopped as is two fifths of it (make long ARGS=rank-kills).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = int(os.environ.get("AGENTRL_RANK_KILLS", "1"))
STEPS = max(16, KILLS * 6)
SETTINGS = (
    "--env math-tools --eval.final_tasks 2 --eval.every 0 --rollout.tasks_per_step 2 --rollout.group_size 4 "
    f"--deterministic true --run.save_every 1 --steps {STEPS} --learner.rank_timeout_s 8"
)


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "100"]
    words = [*launch, "-m", "agentrl", "train", *SETTINGS.split(), "--run.dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, *words], stdout=out, stderr=out, env=environment)


def find_process(folder: Path, rank: int) -> int | None:
    """Find the process of a rank: torchrun says in its environment which it is."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(folder).encode() in (entry / "cmdline").read_bytes():
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment:
                    return int(entry.name)
        except OSError:
            continue
    return None


def has_begun(folder: Path) -> bool:
    """Return True once the run has a checkpoint."""
    return any((folder / "checkpoints").glob("step-*/digest"))


def disturb(process: subprocess.Popen[bytes], folder: Path, signals: list[signal.Signals]) -> int:
    """Send each signal to a rank by chance, a while after the last; return how many met a process."""
    dice, sent, deadline = random.Random(0), 0, time.monotonic() + 120 + 90 * len(signals)
    for number in signals:
        while process.poll() is None and not has_begun(folder) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(dice.uniform(0.0, 4.0 if sent == 0 else 5.0))
        pid = find_process(folder, dice.randrange(2))
        if process.poll() is not None or pid is None:
            continue
        os.kill(pid, number)
        sent += 1
        while Path(f"/proc/{pid}").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
    assert process.wait(max(deadline - time.monotonic(), 1)) == 0
    return sent


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_it_ends_as_if_no_process_had_been_killed(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", tmp_path / "whole.txt")
    assert whole.wait(600) == 0
    signals = [signal.SIGKILL] * KILLS + [signal.SIGSTOP] * max(1, KILLS * 2 // 5)
    random.Random(1).shuffle(signals)
    log = tmp_path / "parts.txt"
    sent = disturb(start(tmp_path / "parts", log), tmp_path / "parts", signals)
    one, other = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()
    said = log.read_text().splitlines()
    stopped = [line for line in said if "did not answer for 8 s" in line or "did not start" in line]
    print(f"\n{sent} of {len(signals)} signals met a process; {len(stopped)} silent ranks were named; equal bits")
    assert sent
