"""Single-turn GRPO on a dataset, with two reward functions written as for TRL.

Run it: python examples/prompt_dataset.py
From the command line: agentrl train --env prompts --env.data FILE.jsonl --env.rewards accuracy,think_format
"""

from pathlib import Path
from typing import Any

import agentrl_envs

from agentrl import train

DATA = Path(agentrl_envs.__file__).parent / "data"


def exact(prompts: list[str], completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    """1.0 where the boxed answer is the row's solution."""
    return [float(f"\\boxed{{{wanted}}}" in text) for text, wanted in zip(completions, solution, strict=True)]


async def brief(completions: list[str], **columns: Any) -> list[float]:
    """1.0 for a short answer. It may be async: a judge, a service."""
    return [float(len(text) < 40) for text in completions]


def main(steps: int = 60) -> None:
    run = train(
        env="prompts",
        env_args={
            "data": str(DATA / "symbols.jsonl"),
            "test_data": str(DATA / "symbols-test.jsonl"),
            "rewards": [exact, brief],
            "reward_weights": [1.0, 0.1],
            "system_prompt": "Answer with \\boxed{}.",
        },
        steps=steps,
    )
    before, after = run.evaluations[0]["reward"], run.evaluations[-1]["reward"]
    print(f"held-out reward: {before:.2f} before, {after:.2f} after {steps} steps")


if __name__ == "__main__":
    main()
