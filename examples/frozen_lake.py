"""A Gymnasium environment, trained on: a small frozen lake. And the other way round: ours as Gymnasium's.

Run it: python examples/frozen_lake.py
"""

from agentrl import as_gymnasium, from_gymnasium, train

# The model is told where it is, and answers with a direction, 0 to 3, in \boxed{}.
Lake = from_gymnasium("FrozenLake-v1", make={"is_slippery": False, "desc": ["SFH", "HFG"]}, max_turns=6)


def main(steps: int = 20) -> None:
    env = as_gymnasium(Lake)  # a gymnasium.Env: text in, messages out
    env.reset(seed=0)
    for action in ("right", "down", "right"):
        messages, reward, *_ = env.step(action)
    print(f"{messages[-1]['content']}\nreward of the way that is known: {reward}")
    env.close()

    summary = train(env=Lake, steps=steps, eval={"every": 0, "final_tasks": 64})
    print(f"held-out reward: {summary['reward_before']:.2f} before, {summary['reward_after']:.2f} after {steps} steps")


if __name__ == "__main__":
    main()
