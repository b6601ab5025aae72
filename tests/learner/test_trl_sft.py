"""Demonstrations against TRL's own SFTTrainer: the same model and tokens, its loss and its step. Needs ``bench``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import LossSettings
from agentrl.credit import assign_credit
from agentrl.learner.advantages.imitation import demonstrated
from agentrl.learner.learner import Learner
from agentrl.models.policy import load_policy
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.demonstration import Demonstration
from agentrl.types import Group, Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
LR = 0.1
SUM: Any = {"name": "sum", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def demonstrate(policy: Any, count: int) -> list[Trajectory]:
    """Make conversations of one turn or two, of different length, some with a call."""
    renderer = TemplateRenderer(policy.tokenizer, None, policy.end_tokens)
    rows = []
    for n in range(count):
        messages: list[Any] = [{"role": "user", "content": f"{n} + {n * 7}?"}]
        if n % 2:
            call = {"id": f"call{n:05}", "function": {"name": "sum", "arguments": {"a": n}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": str(8 * n), "tool_call_id": f"call{n:05}"})
        messages.append({"role": "assistant", "content": "It is " * (n % 3) + str(8 * n)})
        rows.append(Demonstration.parse({"messages": messages, "tools": [SUM]}))
    return [row.to_trajectory(renderer, 1024) for row in rows]


def train_with_trl(model: Any, tokenizer: Any, episodes: list[Trajectory], folder: Path) -> float:
    """Take one step of TRL's trainer over all episodes; return the loss that it logs."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": t.token_ids, "assistant_masks": t.loss_mask} for t in episodes]
    config = SFTConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=len(rows) // 2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        optim="sgd",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_length=None,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    return float(next(row["loss"] for row in trainer.state.log_history if "loss" in row))


@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_the_loss_and_the_step_are_trls(packing: str, tmp_path: Path) -> None:
    policy = load_policy("nano")
    theirs, tokenizer = copy.deepcopy(policy.model), policy.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    episodes = demonstrate(policy, 8)
    expected = train_with_trl(theirs, tokenizer, episodes, tmp_path)
    learner = Learner(
        policy.model,
        [torch.optim.SGD(policy.model.parameters(), lr=LR)],
        LossSettings(loss="sft", packing=packing, max_grad_norm=1e9, threads=1),
    )
    credit = assign_credit([Group(0, (t,)) for t in episodes], demonstrated, min_group_size=1)
    metrics = learner.update(credit.samples(), credit.weights())
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)  # TRL rounds what it logs
    for (name, ours), other in zip(policy.model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, other.to(ours), atol=1e-6), name
