"""A whole training step of a real model, ours and TRL 1.16's, in one run: python benchmarks/trl_real_model.py

Both train the same model (--model smollm2-135m, gemma3-270m, a folder) on the same single-turn prompts, those of
math-tools' training tasks with its calculator described (--prompts short: a sentence each), with TRL's quick-start
reward, -|20 - characters|: GRPO's advantages, the DAPO loss with clips 0.2 / 0.28, one on-policy AdamW update of all
parameters in fp32, no KL term, no gradient checkpointing, the same number of threads. Each side is a process of its
own, one after the other, and begins with a step that is not measured.

  tokens    sampled in a step, all of which are trained
  CPU-s     seconds of all threads of the process in a step: rollout, rewards, advantages, update
  tokens / CPU-s   of the measured steps together
  peak      the largest resident memory of the process, loading the model and the first step included

A micro-batch of TRL is a number of rows (8 by default, as in TRL), of ours a number of tokens (512 by default).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

SUBJECTS = ("the sea", "a bicycle", "winter", "bread", "the moon", "a library", "rain", "an old clock")
Step = dict[str, float]


def near_twenty(completions: Sequence[Any], **others: Any) -> list[float]:
    return [-abs(20.0 - len(completion[0]["content"])) for completion in completions]


def math_tools(count: int) -> list[list[dict[str, str]]]:
    """Return conversations that begin as episodes of math-tools do with a model that knows no tools."""
    from agentrl_envs import math_tasks
    from agentrl_tools.calculator import calculator

    from agentrl.renderer.call_formats import hermes

    before, behind = hermes.format_instructions()
    system = f"{math_tasks.SYSTEM_PROMPT}\n\n{before}{json.dumps(calculator.schema)}{behind}"
    asked = [math_tasks.draw(seed, split="train", level=3).question for seed in range(count)]
    return [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in asked]


def short(count: int) -> list[list[dict[str, str]]]:
    """Return conversations of one sentence."""
    asked = [f"Say something short about {SUBJECTS[i % len(SUBJECTS)]}." for i in range(count)]
    return [[{"role": "user", "content": text}] for text in asked]


def choose_dtype(args: argparse.Namespace) -> str:
    return "bfloat16" if args.device == "cuda" else "float32"


PROMPTS = {"math-tools": math_tools, "short": short}


def make_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"prompt": messages} for messages in PROMPTS[args.prompts](args.steps * args.tasks)]


def agentrl_steps(args: argparse.Namespace, folder: str) -> list[Step]:
    from agentrl import train
    from agentrl.training.callbacks import Callback

    class Recorder(Callback):
        def on_step_end(self, step: int, values: Any) -> None:
            found = {"tokens": values["sampled_tokens"], "wall": values["step_time"], "cpu": values["cpu_seconds"]}
            steps.append(found | {"reward": values["reward"]})

    steps: list[Step] = []
    data = Path(folder, "prompts.jsonl")
    data.write_text("\n".join(map(json.dumps, make_prompts(args))))
    train(
        "prompts",
        args.model,
        env_args={"data": str(data), "rewards": [near_twenty]},
        callbacks=[Recorder()],
        steps=args.steps,
        engine={"threads": args.threads},
        rollout={"tasks_per_step": args.tasks, "group_size": args.group_size, "max_tokens": args.max_tokens},
        dtype=choose_dtype(args),
        learner={
            **{"optimizer": "adamw", "lr": 1e-6, "lr_scheduler": "constant", "warmup_steps": 0},
            **{"max_tokens_per_microbatch": args.max_tokens_per_microbatch, "threads": args.threads},
        },
        eval={"every": 0, "final_tasks": 1},
        run={"dir": f"{folder}/run"},
        verbose=False,
    )
    return steps


def trl_steps(args: argparse.Namespace, folder: str) -> list[Step]:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from agentrl.models.policy import load_policy

    loaded = load_policy(args.model, choose_dtype(args))
    steps: list[Step] = []
    seen: dict[str, float] = {}

    def rewarded(completions: Sequence[Any], completion_ids: Sequence[Any], **others: Any) -> list[float]:
        values = near_twenty(completions)
        seen.update(tokens=sum(map(len, completion_ids)), reward=sum(values) / len(values))
        return values

    class Clock(TrainerCallback):
        def on_step_begin(self, *about: Any, **more: Any) -> None:
            self.begun = perf_counter(), process_time()

        def on_step_end(self, *about: Any, **more: Any) -> None:
            steps.append({"wall": perf_counter() - self.begun[0], "cpu": process_time() - self.begun[1], **seen})

    rows = args.tasks * args.group_size
    config = GRPOConfig(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=args.trl_rows,
        gradient_accumulation_steps=rows // args.trl_rows,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=args.device == "cuda",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=args.device == "cpu",
        **({"use_vllm": True, "vllm_mode": "colocate"} if args.device == "cuda" and find_spec("vllm") else {}),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=loaded.model,
        args=config,
        reward_funcs=rewarded,
        train_dataset=Dataset.from_list(make_prompts(args)),
        processing_class=loaded.tokenizer,
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return steps


SIDES = {"agentrl": agentrl_steps, "TRL": trl_steps}


def run_side(args: argparse.Namespace) -> None:
    """Be one side: its steps, and the memory of the process, as JSON on the last line."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        steps = SIDES[args.side](args, folder)
    if args.device == "cuda":
        print(json.dumps({"steps": steps[1:], "peak_mib": torch.cuda.max_memory_allocated() / 2**20}))
        return
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"steps": steps[1:], "peak_mib": peak_mib}))


def measure(side: str) -> dict[str, float]:
    """Run a side in a process of its own; return what a step of it costs."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    steps = said["steps"]
    mean = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return {**mean, "rate": mean["tokens"] / mean["cpu"], "peak": said["peak_mib"]}


def table(args: argparse.Namespace, measured: dict[str, dict[str, float]]) -> Table:
    rows = args.tasks * args.group_size
    title = f"one step, {rows} rows of at most {args.max_tokens} tokens, {args.model}, {args.threads} thread(s)"
    shown = Table(title=title)
    for name in ("", "tokens", "wall s", "CPU-s", "tokens / CPU-s", "peak MiB", "reward"):
        shown.add_column(name, justify="right" if name else "left")
    for side, m in measured.items():
        cells = f"{m['tokens']:,.0f}", f"{m['wall']:.1f}", f"{m['cpu']:.1f}", f"{m['rate']:.1f}"
        shown.add_row(side, *cells, f"{m['peak']:,.0f}", f"{m['reward']:.1f}", end_section=side == "TRL")
    ours, theirs = measured["agentrl"], measured["TRL"]
    ratio = f"{ours['rate'] / theirs['rate']:.2f} x", f"{ours['peak'] / theirs['peak']:.2f} x"
    shown.add_row("agentrl / TRL", "", "", "", *ratio, "")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", choices=PROMPTS, default="math-tools")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64, help="of a completion (default 64)")
    parser.add_argument("--steps", type=int, default=3, help="of each side, of which the first is left out")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on both sides (default 1)")
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=512, help="of a micro-batch of ours (512)")
    parser.add_argument("--trl-rows", type=int, default=8, help="rows of a micro-batch of TRL (its default 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: in bfloat16, TRL's with vLLM")
    parser.add_argument("--json", action="store_true", help="print the figures, for gpu.py")
    parser.add_argument("--side", choices=SIDES, help="be that side alone; for the benchmark itself")
    args = parser.parse_args()
    if args.tasks * args.group_size % args.trl_rows or args.steps < 2:
        parser.error("--trl-rows has to divide --tasks x --group-size, and --steps is 2 or more")
    if args.side:
        run_side(args)
        return
    measured = {side: measure(side) for side in SIDES}
    if args.json:
        print(json.dumps(measured))
        return
    Console(width=None if Console().is_terminal else 100).print(table(args, measured))


if __name__ == "__main__":
    main()
