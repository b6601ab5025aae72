"""A run that is killed again and again, beside one that is not: python benchmarks/kills.py

``agentrl train --deterministic true`` on math-tools with nano, killed with SIGKILL and gone on with until it ends, as
often as it takes for ``--kills`` kills. Each run that ended so is compared with one that nobody disturbed: the final
weights byte by byte, and the metrics, the episodes, the summary and the names of all files, apart from
what the clock says. With ``--staleness`` the rollouts are asynchronous and the calculator is slow; what is compared
then is the ledger: every task that was dealt is learned from in one step, was played anew for another, or is still
pending at the end; none in two; no token is older than was asked for; and what a checkpoint had seen is kept as it was.

  any         a moment of the run, uniformly
  start       a moment of the start-up, or of going on
  file        before a file operation: the n-th open, rename, mkdir, truncate or removal of the process, n at random
  checkpoint  while a checkpoint is written: its folder aside is there
  episodes    while a step's episodes are written
  measure     during a measurement between steps
  end         after the last step: while the model is saved, or during the last measurement

``--endings`` runs `endings` instead: signals, a notebook's interrupt, a closed pipe and terminal, a full disk.

Other words are settings of the run: ``kills.py --rollout.dynamic_sampling true``. Exit status 1, and the differences,
where there are any.

The undisturbed run is a process of its own. The others are forks of this one, which has imported torch and has started
no thread: an attempt takes half a second to start, not six. They call what ``agentrl`` calls, each in its own process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from endings import Endings, start
from rich.console import Console
from rich.table import Table

from agentrl.cli import main as agentrl
from agentrl.training import checkpoint

STEPS, SAVED, MEASURED, TASKS = 12, 2, 4, 2
SETTINGS = f"""--steps {STEPS} --run.save_every {SAVED} --eval.every {MEASURED} --eval.tasks 2 --eval.final_tasks 2
--rollout.tasks_per_step {TASKS} --rollout.group_size 2 --rollout.max_tokens 48""".split()
AIMS = ("any", "start", "file", "checkpoint", "episodes", "measure", "end")
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.truncate", "os.remove", "os.rmdir", "os.chmod")
CLOCK = (
    *("time/", "wait/", "clock/", "eval/time/", "eval/wait/", "eval/runtime", "eval/cpu_seconds", "tokens_per_second"),
    *("tools/", "train_seconds", "cpu_seconds", "step_time", "run_dir", "model_dir", "metrics"),
)


@dataclass
class Kills:
    """Attempts at one run folder, and what the ledger must hold to."""

    folder: Path
    words: list[str]
    rng: random.Random
    whole_s: float  # what an undisturbed run takes
    killed: Counter[str] = field(default_factory=Counter)
    seen: dict[str, str] = field(default_factory=dict)  # digests of the episodes that a checkpoint has behind it

    def run(self, most: int) -> None:
        """To the run's end; the last attempt is left alone."""
        while True:
            aim = self.rng.choice(AIMS) if sum(self.killed.values()) < most else None
            if self.attempt(aim):
                return
            self.remember()

    def attempt(self, aim: str | None) -> bool:
        """Whether the run came to its end."""
        log = self.folder.with_suffix(".log")
        begun = log.stat().st_size if log.exists() else 0
        pid = self.fork(log, self.rng.randint(1, 150) if aim == "file" else None)
        status = None
        if aim not in (None, "file"):
            status = self.wait(pid, self.sign(aim, log, begun))
            if status is None:
                os.kill(pid, signal.SIGKILL)
        if status is None:
            status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self.killed[aim or "?"] += 1
            return False
        if status != 0:
            raise SystemExit(f"attempt ended with status {status}:\n{log.read_text()[begun:]}")
        return True

    def fork(self, log: Path, operations: int | None) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(target, descriptor)
            if operations is not None:
                sys.addaudithook(_killing(self.folder.name, operations))
            going_on = (self.folder / "config.toml").is_file()
            words = ["--resume", str(self.folder)] if going_on else [*self.words, "--run.dir", str(self.folder)]
            more = [] if going_on else ["--run.resume", "true"]
            status = agentrl(["train", *words, *more])
        finally:
            sys.stdout.flush()
            os._exit(status)

    def wait(self, pid: int, sign: Iterator[bool]) -> int | None:
        """Until the sign comes; the status of a process that ended before."""
        for found in sign:
            if found:
                return None
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            time.sleep(0.0003)
        return None

    def sign(self, aim: str, log: Path, begun: int) -> Iterator[bool]:
        """False until the moment has come."""
        checks: dict[str, tuple[Callable[[], bool], float]] = {
            "any": (lambda: True, self.whole_s / 2),
            "start": (lambda: True, 1.0),
            "checkpoint": (lambda: any((self.folder / "checkpoints").glob(".step-*.part")), 0.02),
            "episodes": (lambda: any((self.folder / "trajectories").glob(".*.part")), 0.001),
            "measure": (lambda: _at_measurement(log, begun), 0.4),
            "end": (lambda: f"step {STEPS}/{STEPS}" in _after(log, begun), 0.8),
        }
        check, within = checks[aim]
        while not check():
            yield False
        until = time.monotonic() + self.rng.uniform(0, within)
        while time.monotonic() < until:
            yield False
        yield True

    def remember(self) -> None:
        """What is behind a checkpoint is finished: nothing may change it."""
        found = checkpoint.load(self.folder / "checkpoints")
        for file in sorted((self.folder / "trajectories").glob("train-*.parquet")) if found else ():
            if found and int(file.stem[-6:]) <= found[0]:
                digest = sha256(file.read_bytes()).hexdigest()
                if self.seen.setdefault(file.name, digest) != digest:
                    raise SystemExit(f"{file} was finished, and was written again")


def _killing(folder: str, operations: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that ends the process before its n-th file operation in a folder."""
    left = operations

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and folder in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _after(log: Path, begun: int) -> str:
    return log.read_bytes()[begun:].decode() if log.exists() else ""


def _at_measurement(log: Path, begun: int) -> bool:
    last = _after(log, begun).rstrip().rpartition("\n")[2]
    return any(last.startswith(f"step {n}/") for n in range(MEASURED, STEPS, MEASURED))


def differences(whole: Path, broken: Path) -> list[str]:
    """What two runs do not have alike; nothing, if all is well."""
    found = [f"{name}: only in one" for name in sorted(_files(whole) ^ _files(broken))]
    found += [f"model/{p.name}" for p in (whole / "model").iterdir() if p.read_bytes() != _bytes(broken, p.name)]
    lines, others = (_lines(run / "metrics.jsonl") for run in (whole, broken))
    found += [f"metrics.jsonl: line {i}" for i, (a, b) in enumerate(zip(lines, others, strict=False)) if a != b]
    found += [f"metrics.jsonl: {len(lines)} and {len(others)} lines"] if len(lines) != len(others) else []
    one, other = (_timeless(json.loads((run / "summary.json").read_text())) for run in (whole, broken))
    found += [f"summary.json: {name}" for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
    for file in sorted((whole / "trajectories").glob("*.parquet")):
        if (broken / "trajectories" / file.name).exists():
            found += [f"{file.name}: row {i}" for i in _other_rows(file, broken / "trajectories" / file.name)]
    return found


def _files(run: Path) -> set[str]:
    """All but what was told, which may be that the machine is busy."""
    return {str(p.relative_to(run)) for p in run.rglob("*")} - {"events.jsonl", "timeline.jsonl"}


def _bytes(run: Path, name: str) -> bytes:
    file = run / "model" / name
    return file.read_bytes() if file.exists() else b""


def _lines(file: Path) -> list[dict[str, Any]]:
    return [_timeless(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith(CLOCK)}


def _other_rows(one: Path, other: Path) -> list[int]:
    a, b = (_episodes(file) for file in (one, other))
    return [i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]]


def _episodes(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(file).drop_columns(["timings"]).to_pylist()
    for row in rows:
        row["calls"] = [{**call, "seconds": None} for call in row["calls"]]
    return rows


def faults(run: Path, staleness: int) -> list[str]:
    """What the ledger of an asynchronous run does not hold; nothing, if all is well."""
    versions = {0: 0} | {r["step"]: int(r["policy_version"]) for r in _lines(run / "metrics.jsonl") if "reward" in r}
    homes: dict[int, list[int]] = {}
    found: list[str] = []
    for step in range(1, STEPS + 1):
        rows = _episodes(run / "trajectories" / f"train-{step:06d}.parquet")
        for task in {row["task"] for row in rows}:
            homes.setdefault(task, []).append(step)
        sampled = [v for row in rows for s in row["segments"] for v in s["versions"] or ()]
        oldest = versions[step - 1] - min(sampled)
        if oldest > staleness:
            found.append(f"step {step} learned from tokens {oldest} versions old")
        if len({row["task"] for row in rows}) < TASKS:
            found.append(f"step {step} has {len({row['task'] for row in rows})} groups")
    loaded = checkpoint.load(run / "checkpoints")
    assert loaded is not None
    step, state = loaded
    pending = [slot.task for _, slot in state["scheduler"].slots]
    found += [f"task {task} was learned from in steps {steps}" for task, steps in homes.items() if len(steps) > 1]
    found += [f"task {task} was learned from, and is pending" for task in pending if task in homes]
    dealt = range(state["task_sampler"]["cursor"])
    found += [f"task {task} was dealt, and is gone" for task in {*dealt} - {*pending, *homes}]
    return [*found, *([] if step == STEPS else [f"the last checkpoint is of step {step}"])]


def undisturbed(folder: Path, words: list[str]) -> float:
    """The run as its own process; how long one takes that is forked."""
    command = [sys.executable, "-m", "agentrl", "train", *words, "--run.dir", str(folder)]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
    again = Kills(folder.with_name("again"), words, random.Random(0), 0.0)
    begun = time.monotonic()
    again.attempt(None)
    return time.monotonic() - begun


def end_in_each_way(words: list[str], names: list[str]) -> bool:
    """Print a table of `endings`, those named or all; return whether one was not as it should be."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    table, wrong = Table("ending", "found", "seconds"), False
    with tempfile.TemporaryDirectory() as place:
        runs = Endings(words, Path(place), {**os.environ, "PYTHONPATH": path})
        whole = Path(place, "whole")
        alone = start(runs.command(whole), runs.environment)
        assert alone.end() == 0, alone.text
        for name, act in runs.all():
            if not names or name in names:
                begun = time.monotonic()
                found = runs.run(name, act, lambda broken: differences(whole, broken))
                wrong |= found not in ("as if never disturbed", "not tried: it needs the right to mount")
                table.add_row(name, found, f"{time.monotonic() - begun:.0f}")
                print(f"{name}: {found}", flush=True)
    Console().print(table)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--staleness", type=int, default=0, help="rollout.max_staleness")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--endings", nargs="*", metavar="NAME", help="other endings than kills; all of them by default")
    args, more = parser.parse_known_args()
    slow = ["--env", "rollout:SlowMath", "--env.mean_s", "0.05", "--rollout.max_staleness", str(args.staleness)]
    exact = ["--env", "math-tools", "--deterministic", "true"]
    words = [*(slow if args.staleness else exact), *SETTINGS, *more]
    for name in ("agentrl.cli.progress", "agentrl.training.train", "agentrl_envs.math_tools", "rollout"):
        importlib.import_module(name)
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")

    if args.endings is not None:
        sys.exit(end_in_each_way(words, args.endings))
    rng, begun, killed, wrong, runs = random.Random(args.seed), time.monotonic(), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place, "whole")
        whole_s = undisturbed(whole, words)
        while sum(killed.values()) < args.kills:
            runs += 1
            kills = Kills(Path(place, f"broken-{runs}"), words, rng, whole_s)
            kills.run(args.kills - sum(killed.values()))
            killed += kills.killed
            told = faults(kills.folder, args.staleness) if args.staleness else differences(whole, kills.folder)
            wrong += bool(told)
            print(
                f"run {runs}: {sum(kills.killed.values())} kills; {'; '.join(told) or 'as if never killed'}", flush=True
            )
    table = Table(*AIMS, "kills", "runs", "not alike", "minutes")
    minutes = (time.monotonic() - begun) / 60
    table.add_row(*(str(killed[a]) for a in AIMS), str(sum(killed.values())), str(runs), str(wrong), f"{minutes:.1f}")
    Console().print(table)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
