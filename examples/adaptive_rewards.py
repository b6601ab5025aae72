"""Rewards that set their own weight: the format first, then the answer, as soon as the format comes off.

Run it: python examples/adaptive_rewards.py
From the command line: agentrl train --env prompts --env.data FILE.jsonl
    --env.rewards examples/adaptive_rewards.py:boxed,examples/adaptive_rewards.py:exact
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentrl_envs

from agentrl import train
from agentrl.rewards.trainer_state import TrainerState

DATA = Path(agentrl_envs.__file__).parent / "data"


def success_rate(state: TrainerState, reward: str, steps: int = 4) -> float:
    """Average a reward over the latest steps; 0.0 before the first one."""
    means = [row.get(f"rewards/{reward}/mean", 0.0) for row in state.log_history[-steps:]]
    return sum(means) / len(means) if means else 0.0


def boxed(
    completions: list[str], trainer_state: TrainerState, set_weight: Callable[[float], None], **columns: Any
) -> list[float]:
    r"""1.0 for one \boxed{}; it counts the less, the more often there is one."""
    set_weight(1.0 - 0.9 * success_rate(trainer_state, "boxed"))
    return [float(text.count("\\boxed{") == 1) for text in completions]


def exact(
    completions: list[str],
    solution: list[str],
    trainer_state: TrainerState,
    set_weight: Callable[[float], None],
    **columns: Any,
) -> list[float]:
    """1.0 where the boxed answer is the row's solution; it counts the more, the more often there is a box."""
    set_weight(0.1 + 1.9 * success_rate(trainer_state, "boxed"))
    return [float(f"\\boxed{{{right}}}" in text) for text, right in zip(completions, solution, strict=True)]


def main(steps: int = 60) -> None:
    run = train(
        env="prompts",
        env_args={
            "data": str(DATA / "symbols.jsonl"),
            "test_data": str(DATA / "symbols-test.jsonl"),
            "rewards": [boxed, exact],
            "system_prompt": "Answer with \\boxed{}.",
        },
        steps=steps,
    )
    before, after = run.evaluations[0]["reward"], run.evaluations[-1]["reward"]
    print(f"held-out reward, both parts weighing 1: {before:.2f} before, {after:.2f} after {steps} steps")


if __name__ == "__main__":
    main()
