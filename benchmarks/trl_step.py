"""A whole training step, ours and TRL 1.16's, in one run: python benchmarks/trl_step.py

Both train the same model on the same tasks (math-tools: 16 x 8 episodes, T = 1, at most 64 new tokens a turn and 5
turns) with the same tool, an async calculator that answers at once or after 200 ms, and the same objective: GRPO's
advantages, the DAPO loss with clips 0.2 / 0.28, one on-policy AdamW update, no KL term. Neither checkpoints gradients;
both are fp32 and get the same number of threads.

  wall    seconds of a step: rollout, rewards, advantages, update
  CPU-s   seconds of all threads of the process in that step
  calls   results that the model got to read, an episode
  reward  of the step. The learning rate is so small that every step, of either side, meets the same policy

Medians over the steps; each side's first step (TRL: its first generation, ours: the growth of the cache) is left out.

What is not equal, and for whom it is better:
  TRL's limit on new tokens holds for a whole episode; its generation config is set to 64 a turn, which it lacks (TRL).
  Our time includes writing metrics and trajectories to the disk; TRL logs and saves nothing (TRL).
  TRL ends an episode at a malformed call; ours tells the model, which samples another turn (TRL).
  A micro-batch of TRL is a number of rows, of ours a number of tokens; each side has the one it was quickest with.
  We leave out rows whose advantage is zero and sample with continuous batching: that is ours to gain.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import anyio
import torch
from agentrl_envs import math_tasks
from agentrl_envs.rewards import accuracy
from agentrl_tools.calculator import calculator as our_calculator
from rich.console import Console
from rich.table import Table
from rollout import SlowMath

from agentrl import train as agentrl_train
from agentrl.environments.task_sampler import TaskSampler
from agentrl.models import policy
from agentrl.training.callbacks import Callback

GROUP_SIZE, TURN_TOKENS, TURNS = 8, 64, 5


class Cost(NamedTuple):
    """One training step."""

    wall_s: float
    cpu_s: float
    calls: float  # an episode
    reward: float


@dataclass
class Settings:
    model: str
    tasks: int
    steps: int  # the first one included
    threads: int
    lr: float
    max_tokens_per_microbatch: int  # a micro-batch of ours
    trl_rows: int  # and of TRL
    seed: int


# -- agentrl ---------------------------------------------------------------------------------------------------------


@dataclass
class Recorder(Callback):
    """Keeps what each step of our training says about itself."""

    costs: list[Cost] = field(default_factory=list)

    def on_step_end(self, step: int, values: Any) -> None:
        calls = values["tools/call_frequency"]
        self.costs.append(Cost(values["step_time"], values["cpu_seconds"], calls, values["reward"]))


def agentrl_steps(s: Settings, latency_s: float) -> list[Cost]:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        agentrl_train(
            SlowMath,
            s.model,
            env_args={"mean_s": latency_s},
            callbacks=[recorder],
            steps=s.steps,
            seed=s.seed,
            engine={"threads": s.threads},
            rollout={
                "tasks_per_step": s.tasks,
                "group_size": GROUP_SIZE,
                "max_tokens": TURN_TOKENS,
                "max_turns": TURNS,
            },
            learner={
                **{"optimizer": "adamw", "lr": s.lr, "lr_scheduler": "constant", "warmup_steps": 0},
                **{"max_tokens_per_microbatch": s.max_tokens_per_microbatch, "threads": s.threads},
            },
            eval={"every": 0, "final_tasks": 1},
            run={"dir": folder},
        )
    return recorder.costs


# -- TRL -------------------------------------------------------------------------------------------------------------


def trl_steps(s: Settings, latency_s: float) -> list[Cost]:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    loaded = policy.load_policy(s.model)
    loaded.tokenizer.response_template = qwen3_template  # nano's calls have the form of Qwen3's
    calls: list[int] = []
    rewards: list[float] = []

    async def calculator(expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: numbers, + - * / // % ** and parentheses, such as "(12+7)*3".
        """
        if latency_s:
            await anyio.sleep(latency_s)
        return await our_calculator(expression=expression)

    def correct(completions: Sequence[Any], solution: Sequence[str], **others: Any) -> list[float | None]:
        values = accuracy(completions, solution)
        calls.append(sum(m["role"] == "tool" for c in completions for m in c))
        rewards.extend(v or 0.0 for v in values)
        return values

    class Clock(TrainerCallback):
        """A step is the time between these two: generation and the update lie in between."""

        def __init__(self) -> None:
            self.costs: list[Cost] = []

        def on_step_begin(self, *about: Any, **more: Any) -> None:
            calls.clear()
            rewards.clear()
            self.begun = perf_counter(), process_time()

        def on_step_end(self, *about: Any, **more: Any) -> None:
            wall, cpu = perf_counter() - self.begun[0], process_time() - self.begun[1]
            self.costs.append(Cost(wall, cpu, sum(calls) / len(rewards), sum(rewards) / len(rewards)))

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=s.steps,
            per_device_train_batch_size=s.trl_rows,
            gradient_accumulation_steps=s.tasks * GROUP_SIZE // s.trl_rows,
            num_generations=GROUP_SIZE,
            max_completion_length=TURNS * TURN_TOKENS + 150,  # the whole episode, results included
            max_tool_calling_iterations=TURNS - 1,
            temperature=1.0,
            learning_rate=s.lr,
            lr_scheduler_type="constant",
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch",
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=s.seed,
        )
        trainer = GRPOTrainer(
            model=loaded.model,
            args=config,
            reward_funcs=correct,
            train_dataset=Dataset.from_list(same_tasks(s)),
            processing_class=loaded.tokenizer,
            tools=[calculator],
            callbacks=[clock := Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.generation_config.max_new_tokens = TURN_TOKENS
        trainer.train()
    return clock.costs


def same_tasks(s: Settings) -> list[dict[str, Any]]:
    """The tasks of our run, in its order."""
    found = []
    for seed in TaskSampler(None, s.seed).next_tasks(s.steps * s.tasks):
        task = math_tasks.draw(seed, split="train")
        prompt = [
            {"role": "system", "content": SlowMath.system_prompt},
            {"role": "user", "content": task.question},
        ]
        found.append({"prompt": prompt, "solution": str(task.answer)})
    return found


# -- both ------------------------------------------------------------------------------------------------------------


def typical(costs: Sequence[Cost]) -> Cost:
    return Cost(*map(median, zip(*costs[1:], strict=True)))


def table(measured: dict[float, tuple[Cost, Cost]], title: str) -> Table:
    shown = Table(title=title)
    for name in ("tool latency", "", "wall s", "CPU-s", "calls/episode", "reward"):
        shown.add_column(name, justify="left" if name in ("", "tool latency") else "right")
    for latency_s, (ours, theirs) in measured.items():
        for name, cost in (("agentrl", ours), ("TRL", theirs)):
            shown.add_row(f"{latency_s * 1e3:.0f} ms", name, *(f"{n:.2f}" for n in cost))
        ratios = (f"{theirs.wall_s / ours.wall_s:.1f} x", f"{theirs.cpu_s / ours.cpu_s:.1f} x")
        shown.add_row("", "TRL / agentrl", *ratios, end_section=True)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side (default 3)")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 0.2], help="of the tool, in seconds")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on both sides (default 1)")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=2048, help="tokens of a micro-batch of ours")
    parser.add_argument("--trl-rows", type=int, default=32, help="rows of a micro-batch of TRL")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.tasks * GROUP_SIZE % args.trl_rows:
        parser.error(f"--trl-rows {args.trl_rows} does not divide {args.tasks} x {GROUP_SIZE} episodes")
    if find_spec("trl") is None:
        raise SystemExit('TRL is not installed, and this compares with it: pip install -e ".[bench]"')
    settings = Settings(
        model=args.model,
        tasks=args.tasks,
        steps=args.steps + 1,
        threads=args.threads,
        lr=args.lr,
        max_tokens_per_microbatch=args.max_tokens_per_microbatch,
        trl_rows=args.trl_rows,
        seed=args.seed,
    )
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    measured = {
        latency: (typical(agentrl_steps(settings, latency)), typical(trl_steps(settings, latency)))
        for latency in args.latency
    }
    title = f"one step, {args.tasks} x {GROUP_SIZE} episodes, {args.model}, {args.threads} thread(s)"
    Console(width=None if Console().is_terminal else 100).print(table(measured, title))


if __name__ == "__main__":
    main()
