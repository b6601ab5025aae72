"""Hello: train the policy that comes with agentrl to use a calculator, on a CPU, in minutes.

Run it: python examples/hello.py
"""

from agentrl import train


def main(steps: int = 20) -> None:
    run = train(env="math-tools", steps=steps, eval={"every": 0, "final_tasks": 64})
    summary = run.summary
    print(f"held-out reward: {summary['reward_before']:.2f} before, {summary['reward_after']:.2f} after {steps} steps")
    print(f"{len(run.episodes('split=train solved'))} episodes of training were solved; the model is in {run.folder}")


if __name__ == "__main__":
    main()
