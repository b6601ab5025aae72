"""A loop of your own, from the parts that `agentrl.train` is made of: your advantages, your schedule, your prints.

Run it: python examples/own_loop.py
"""

from collections.abc import Sequence
from statistics import fmean

from agentrl import Learner, LossSettings, Trajectory, assign_credit, evaluate, make_optimizers, open_rollouts


def above_the_mean(groups: Sequence[Sequence[Trajectory]]) -> list[list[float]]:
    """Give each episode its reward less its group's mean, as Dr. GRPO does."""
    rewards = [[t.reward or 0.0 for t in group] for group in groups]
    return [[reward - fmean(own) for reward in own] for own in rewards]


def main(steps: int = 40, tasks: int = 256) -> float:
    with open_rollouts("math-tools", steps=steps) as rollouts:
        optimizers = make_optimizers(rollouts.model, "muon", lr=1e-3)
        learner = Learner(rollouts.model, optimizers, LossSettings(threads=1, max_tokens_per_microbatch=2048))
        for step, batch in enumerate(rollouts, 1):
            credit = assign_credit(batch.groups, above_the_mean)
            learner.set_lr(1 - (step - 1) / steps)
            metrics = learner.update(credit.samples(), credit.weights())
            rollouts.update_weights(learner.version)
            rewards = [t.reward for group in batch.groups for t in group if t.reward is not None]
            print(f"step {step}  reward {fmean(rewards):.3f}  loss {metrics.get('loss', 0.0):.4f}", flush=True)
    measured = evaluate("math-tools", rollouts.model, tokenizer=rollouts.tokenizer, tasks=tasks)
    print(f"held-out reward: {measured.reward:.3f} ({measured.low:.3f}-{measured.high:.3f})")
    return measured.reward


if __name__ == "__main__":
    main()
