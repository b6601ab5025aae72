"""Single-turn questions about digits, without tools. A seed is a task."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.environments.task_sampler import task_index
from agentrl_envs.splits import Split, assign_split

SYSTEM_PROMPT = "Answer with \\boxed{}."

_ASK = {
    "reverse": ("Reverse the digits of {}.", "Write {} backwards."),
    "sort": ("Sort the digits of {}.", "Put the digits of {} in order, smallest first."),
    "larger": ("Which is larger, {} or {}?", "What is the larger of {} and {}?"),
    "smaller": ("Which is smaller, {} or {}?", "What is the smaller of {} and {}?"),
}


@dataclass(frozen=True)
class _SymbolTask:
    prompt: str
    solution: str
    family: str
    numbers: tuple[str, ...]


def draw(seed: int, *, split: Split) -> _SymbolTask:
    rng = random.Random(f"symbols/{task_index(seed)}/{split}")
    family = rng.choice(list(_ASK))
    while True:
        numbers = _numbers(rng, family)
        if assign_split(f"{family} {' '.join(sorted(numbers))}") == split:
            prompt = rng.choice(_ASK[family]).format(*numbers)
            return _SymbolTask(prompt, _solve(family, numbers), family, numbers)


def _solve(family: str, numbers: Sequence[str]) -> str:
    match family:
        case "reverse":
            return numbers[0][::-1]
        case "sort":
            return "".join(sorted(numbers[0]))
        case "larger":
            return max(numbers, key=int)
    return min(numbers, key=int)


def _numbers(rng: random.Random, family: str) -> tuple[str, ...]:
    """Draw digits without zeros, so that an answer is the same as a number and as a string."""
    length = rng.randint(3, 6)
    one, two = ("".join(rng.choices("123456789", k=length)) for _ in range(2))
    if family in ("reverse", "sort"):
        return (one,)
    return (one, two) if one != two else _numbers(rng, family)


def write_rows(path: Path, *, rows: int, split: Split) -> None:
    """Write `rows` different tasks as JSON lines with the columns prompt and solution."""
    tasks: dict[str, str] = {}
    seed = 0
    while len(tasks) < rows:
        task = draw(seed, split=split)
        tasks[task.prompt] = task.solution
        seed += 1
    lines = (json.dumps({"prompt": p, "solution": s}) + "\n" for p, s in tasks.items())
    path.write_text("".join(lines), encoding="utf-8")
