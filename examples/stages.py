"""Stages: the format first, then the answer. One run, one policy, and an optimizer that goes through.

Run it: python examples/stages.py
In a file, each is a [[stages]] table, with rewards by name: docs/training.md
"""

from pathlib import Path
from typing import Any

import agentrl_envs

from agentrl import train

DATA = Path(agentrl_envs.__file__).parent / "data"


def boxed(completions: list[str], **columns: Any) -> list[float]:
    r"""1.0 for one \boxed{}, whatever is in it."""
    return [float(text.count("\\boxed{") == 1) for text in completions]


def exact(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    """1.0 where the boxed answer is the row's solution."""
    return [float(f"\\boxed{{{right}}}" in text) for text, right in zip(completions, solution, strict=True)]


def main(steps: int = 60) -> None:
    run = train(
        env="prompts",
        env_args={
            "data": str(DATA / "symbols.jsonl"),
            "test_data": str(DATA / "symbols-test.jsonl"),
            "rewards": [exact],
            "system_prompt": "Answer with \\boxed{}.",
        },
        stages=[
            {"name": "format", "steps": max(steps // 4, 1), "env": {"rewards": [boxed]}},
            {"name": "answer", "steps": max(steps - steps // 4, 1)},
        ],
    )
    before, after = run.evaluations[0]["reward"], run.evaluations[-1]["reward"]
    print(f"held-out reward: {before:.2f} before, {after:.2f} after {steps} steps")


if __name__ == "__main__":
    main()
