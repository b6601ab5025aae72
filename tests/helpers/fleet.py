"""Whole runs of ranks, servers and players, whose processes are found in /proc and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.processes import heed_interrupts

# 26 steps come to some 0.9 from 0.26.
SETTINGS = (
    "--env math-tools --eval.every 0 --eval.final_tasks 128 --run.save_every 2 --learner.rank_timeout_s 120 "
    "--engine.weight_sync_timeout_s 60 --players 2"
)


class FleetRun:
    """A run that goes on in other processes.

    Args:
        words: of Python's command line, but for the run folder.
    """

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder, self._log = folder / "run", folder / "log.txt"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        with self._log.open("wb") as out:
            command = [sys.executable, *words, "--run.dir", str(self.folder)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=variables, preexec_fn=heed_interrupts)

    def read_log(self) -> str:
        return self._log.read_text()

    def count_steps(self) -> int:
        """Count the steps of the run so far."""
        metrics = self.folder / "metrics.jsonl"
        return sum('"step"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_for_steps(self, steps: int) -> None:
        self.wait_for(lambda: self.count_steps() >= steps)

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.read_log())

    def wait_for(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 900
        while not holds():
            assert self.process.poll() is None, self.read_log()[-3000:]
            assert time.monotonic() < deadline, self.read_log()[-3000:]
            time.sleep(0.2)

    def find_rank(self, rank: int) -> int:
        """Find the process of a rank."""
        return find_process(lambda words, own: f"RANK={rank}" in own and str(self.folder) in words and "train" in words)

    def end_well(self) -> None:
        """Wait for the end, at the usual reward."""
        assert self.process.wait(1200) == 0, self.read_log()[-3000:]
        summary = json.loads((self.folder / "summary.json").read_text())
        assert summary["reward_after"] > summary["reward_before"] + 0.4
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "reward" in row] == list(range(1, summary["steps"] + 1))  # each one once
        print(f"\n{summary['reward_before']:.3f} -> {summary['reward_after']:.3f}")


def find_process(matches: Callable[[list[str], list[str]], bool]) -> int:
    """Find the first process by the words of its command line, and its environment."""
    found = (pid for pid in list_pids() if matches(read_words(pid, "cmdline"), read_words(pid, "environ")))
    return next(found)


def find_child(parent: int, word: str) -> int:
    """Find a child of a process by a word of its command line."""
    return next(pid for pid in list_pids() if find_parent(pid) == parent and word in read_words(pid, "cmdline"))


def find_parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def list_pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def read_words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
