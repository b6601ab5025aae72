"""A training script of TRL's, which is read and never run."""

import re
from typing import Any

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"[0-9]+")


def last_number(text: str) -> str:
    return str((NUMBER.findall(text) or [""])[-1])


def exact(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    return [float(last_number(text) == right) for text, right in zip(completions, solution, strict=True)]


async def brief(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) < 40) for text in completions]


dataset = load_dataset("json", data_files="rows.jsonl", split="train")
training_args = GRPOConfig(
    output_dir="out",
    learning_rate=1e-4,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    max_steps=1,
    bf16=False,
    reward_weights=[1.0, 0.1],
)
trainer = GRPOTrainer(model="nano", reward_funcs=[exact, brief], args=training_args, train_dataset=dataset)
trainer.train()
