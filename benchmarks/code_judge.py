"""Answers to programming tasks, judged: milliseconds an answer, and answers a second with eight at once.

    python benchmarks/code_judge.py [--answers 200] [--tree DIR]

``--tree`` is another checkout, such as ``git worktree add DIR COMMIT``, measured in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio

ANSWER = "```python\ndef f(n):\n    return n * n\n```"
ROWS: dict[str, tuple[Any, str | None]] = {
    "ten pairs": ([[[n], n * n] for n in range(10)], "f"),
    "three asserts (MBPP)": ("\n".join(f"assert f({n}) == {n * n}" for n in range(3)), None),
    "check(f), seven asserts (HumanEval)": (
        "def check(candidate):\n" + "".join(f"    assert candidate({n}) == {n * n}\n" for n in range(7)) + "check(f)",
        None,
    ),
    "a loop of seven": ("for n in range(7): assert f(n) == n * n", None),
}


async def measure(answers: int) -> dict[str, tuple[float, float]]:
    """Measure seconds an answer alone, and answers a second with eight at once, for each kind of row."""
    from agentrl_envs.rewards import Code

    reward = Code(timeout_s=30.0)
    found = {}
    for name, (tests, function) in ROWS.items():
        assert await reward.score(ANSWER, tests, function) == 1.0
        began = perf_counter()
        for _ in range(answers):
            await reward.score(ANSWER, tests, function)
        alone = (perf_counter() - began) / answers
        left = iter(range(answers))
        began = perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(_work, reward, left, tests, function)
        found[name] = (alone, answers / (perf_counter() - began))
    await reward.close()
    return found


async def _work(reward: Any, left: Any, tests: Any, function: str | None) -> None:
    for _ in left:
        await reward.score(ANSWER, tests, function)


def run(tree: Path, answers: int) -> dict[str, tuple[float, float]]:
    """Measure a checkout, in a process of its own."""
    path = os.pathsep.join(str(tree / part) for part in ("", "envs", "tools"))
    command = [sys.executable, __file__, "--answers", str(answers), "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    found: dict[str, tuple[float, float]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.json:
        print(json.dumps(anyio.run(measure, args.answers)))
        return
    trees = [Path(__file__).resolve().parent.parent, *([args.tree.resolve()] if args.tree else [])]
    rounds = [[run(tree, args.answers) for tree in trees] for _ in range(3)]
    print(f"load {os.getloadavg()[0]:.1f}; the best of three rounds")
    print(f"{'':<38}" + "".join(f"{tree.name + ': ms':>20}{'answers/s':>12}" for tree in trees))
    for name in ROWS:
        best = [(min(r[k][name][0] for r in rounds), max(r[k][name][1] for r in rounds)) for k in range(len(trees))]
        print(f"{name:<38}" + "".join(f"{seconds * 1e3:>20.2f}{rate:>12.0f}" for seconds, rate in best))


if __name__ == "__main__":
    main()
