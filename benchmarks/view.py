"""How long does somebody wait who looks at a long run?

A run of 100,000 episodes (782 steps of 128) is written, with the trainer's own writer and schema, and looked at as
``agentrl view`` shows it, in Chromium (``pip install playwright``, and the system's Chromium).

first view    from the request for the page to curves, findings and all, drawn; the server has been started just before
              and reads the run meanwhile ("not kept"), or finds the index that it kept the last time ("kept")
episodes      the same for the list of episodes, ``failed calls>3 tool=search``, and text looked for in all of them
jump          to the middle of the list
open          a conversation, from the click
report        ``agentrl report``, the whole command

    python benchmarks/view.py [--episodes 100000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import sync_playwright

from agentrl.credit import assign_credit
from agentrl.learner.advantages.group import grpo
from agentrl.runs.folder import RunFolder
from agentrl.runs.metrics import group_metrics
from agentrl.types import CallRecord, Group, Message, Segment, Stop, Trajectory
from agentrl.view.index_cache import locate_index

SIZE, TASKS = 8, 16


def episode(task: int, random: Random) -> Trajectory:
    """A search or five, and an answer that is right as often as not: some 600 tokens."""
    said: list[Message] = [{"role": "user", "content": f"Question {task}: which of these is the oldest?" + " and" * 30}]
    segments, calls = [Segment("prompt", tuple(range(200)))], []
    for turn in range(random.randint(1, 5)):
        failed = random.random() < 0.2
        said.append({"role": "assistant", "content": f"Let me look for {turn}. " + "I think. " * 12})
        said.append(
            {"role": "tool", "content": "error: no such page" if failed else f"page {turn}" * 20, "name": "search"}
        )
        segments.append(Segment("model", tuple(range(80)), tuple(-random.random() for _ in range(80)), (0,) * 80))
        segments.append(Segment("env", tuple(range(40))))
        calls.append(CallRecord(turn, "search", "tool" if failed else "ok", random.random()))
    right = {"correct": float(random.random() < 0.5)}
    return Trajectory(
        task, tuple(segments), tuple(said), Stop.TERMINATED, right, calls=tuple(calls), timings={"total": 3.0}
    )


def write(folder: Path, episodes: int) -> None:
    """A step as the trainer writes it; the others are that one with other tasks and in another order."""
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.toml").write_text('model = "nano"\nsteps = 782\n[env]\nname = "search"\n')
    run, random = RunFolder(folder), Random(0)
    groups = [Group(t, tuple(episode(t, random) for _ in range(SIZE))) for t in range(TASKS)]
    run.write_trajectories(1, assign_credit(groups, grpo, reduce=lambda lengths: [1.0] * len(lengths)))
    table = pq.read_table(folder / "trajectories/train-000001.parquet")
    schema, metrics = table.schema, group_metrics(groups)
    for step in range(1, episodes // (SIZE * TASKS) + 2):
        order = np.roll(np.arange(table.num_rows), step * SIZE)
        made = table.take(pa.array(order))
        made = made.set_column(0, schema.field(0), pa.array(np.full(made.num_rows, step, np.int32)))
        made = made.set_column(2, schema.field(2), pa.array(np.repeat(np.arange(TASKS) + step * TASKS, SIZE)))
        pq.write_table(made, folder / f"trajectories/train-{step:06d}.parquet", compression="zstd")
        times = {"step_time": 3.0, "time/generate": 2.0, "time/tools": 0.5, "time/learn": 0.5}
        run.log({"step": step, **metrics, "reward": min(0.6, step / 400), "policy_version": step, **times})


@contextmanager
def served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "agentrl", "view", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://[\d.:]+", process.stdout.readline())
    assert found
    try:
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


class Looker:
    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_page(viewport={"width": 1366, "height": 768})
        self.page.goto(url + "/static/icon.svg")  # the browser is up
        self.url = url

    def timed(self, act: Callable[[Any], object], seen: str) -> float:
        started = time.perf_counter()
        act(self.page)
        while not self.page.evaluate(seen):
            time.sleep(0.005)
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")  # it is painted
        return time.perf_counter() - started

    def first(self) -> float:
        seen = "document.querySelectorAll('.chart path.line').length > 4 && !!document.querySelector('.findings li')"
        return self.timed(lambda p: p.goto(self.url, wait_until="commit"), seen)

    def rest(self) -> dict[str, float]:
        counted = "(document.querySelector('#counted')?.textContent || '')"
        rows = "!!document.querySelector('.row[data-id]')"
        search = "tool=search"
        found = {"episodes": self.timed(lambda p: p.keyboard.press("2"), f"{rows} && /^100,/.test({counted})")}
        fill = lambda text: lambda p: p.fill("#search", text)  # noqa: E731
        found["failed calls>3 tool=search"] = self.timed(fill(f"failed calls>3 {search}"), f"/ of 100/.test({counted})")
        before = self.page.inner_text("#counted")
        found["text in all"] = self.timed(fill('"no such page"'), f"{counted} !== {json.dumps(before)}")
        self.timed(fill(""), f"/^100,\\d+ episodes$/.test({counted})")
        jump = lambda p: p.evaluate("document.querySelector('.list').scrollTop = 1400000")  # noqa: E731
        found["jump"] = self.timed(jump, f"{rows} && document.querySelector('.row').id > 'row-49'")
        found["open"] = self.timed(lambda p: p.click(".row >> nth=9"), "!!document.querySelector('.message')")
        return found


def measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as api:
        browser = api.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(repeats):
            if (index := locate_index(folder)) is not None:
                index.unlink(missing_ok=True)
            for name in ("first view, not kept", "first view, kept"):
                with served(folder) as url:
                    looker = Looker(browser, url)
                    found.setdefault(name, []).append(looker.first())
                    while looker.page.evaluate("fetch('/api/runs').then(a => a.json())")[0]["progress"] < 1:
                        time.sleep(0.1)
                    time.sleep(0.5)  # the index is written
                    if name.endswith(" kept") and "not" not in name:
                        for what, seconds in looker.rest().items():
                            found.setdefault(what, []).append(seconds)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "agentrl", "report", str(folder)], check=True, capture_output=True)
        found["report"] = [time.perf_counter() - started]
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write(run, given.episodes)
        print(f"| {given.episodes:,} episodes | median s | most s |\n|---|---|---|")
        for name, seconds in measure(run, given.repeats).items():
            print(f"| {name} | {median(seconds):.2f} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()
