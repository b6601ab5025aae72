"""Whole batches against TRL's own GRPOTrainer: the same model and rollouts, its loss and its gradient.

TRL's trainer gets the rollouts by its ``rollout_func``, and makes rewards into advantages, micro-batches and a gradient
by itself; ours takes the same episodes as groups, through the ledger and the learner. It needs the extra ``bench``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.credit import BatchCut, Credit, assign_credit
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.losses.reduction import PER_UPDATE, reduce_rows
from agentrl.runs import metrics
from agentrl.settings.catalogue import list_own_entries
from agentrl.types import Group, Segment, Stop, Trajectory
from tests.helpers.tiny import qwen3

ADVANTAGES = dict(list_own_entries("advantage"))
LOSSES = dict(list_own_entries("loss"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

STEP = 0.05  # of SGD
LONGEST = 40  # tokens of a completion at most, for dr_grpo
END = 1  # TRL's end of text: a completion without it at its end is a truncated one
PARTS = ("a", "b")

# Two parts a member. Flat groups, members exactly at the mean, sums that differ by rounding alone, all kinds beside
# each other.
REWARDS = [
    [(0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.5, 0.0)],
    [(1.0, 0.0)] * 4,
    [(0.0, 0.0)] * 4,
    [(0.1, 0.2), (0.3, 0.0), (0.0, 0.3), (0.2, 0.1)],
    [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.0, 0.25)],
    [(0.0, 3.0), (0.0, 0.0), (0.25, 3.0), (1.0, 0.0)],
]


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients it was given; where ``moves``, it makes its steps too."""

    moves = False
    all_seen: list[dict[int, Tensor]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = {id(p): torch.clone(p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None}
        self.all_seen = [*getattr(self, "all_seen", ()), self.seen]
        if self.moves:
            super().step()


@dataclass(frozen=True)
class Case:
    """What both sides compute."""

    loss: str = "dapo"
    advantage: str = "grpo"
    micro_batches: int = 1
    beta: float = 0.0
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    level: str = "token"
    masked: bool = False
    engine: str | None = None  # correction of an engine whose logprobs are its own
    even: bool = False  # completions of one length: TRL takes some means in each micro-batch, ours never does
    packing: str = "prefix"
    steps: int = 1  # optimizer steps that the batch is cut into
    passes: int = 1

    @property
    def cut(self) -> BatchCut:
        return BatchCut(self.steps, "any", LOSSES[self.loss].reduction in PER_UPDATE)

    def masks(self, t: Trajectory) -> bool:
        return self.masked and t.stop == Stop.MAX_TOKENS


CASES = [
    *(Case(loss, micro_batches=m) for loss in ("dapo", "grpo", "dr_grpo", "cispo", "sapo") for m in (1, 6)),
    *(Case(loss, beta=0.1, micro_batches=m) for loss in ("dapo", "grpo") for m in (1, 6)),
    *(Case(advantage=a, micro_batches=3) for a in ("dr_grpo", "batch", "gdpo")),
    *(Case(advantage=a, beta=0.1) for a in ("batch", "gdpo")),
    Case("luspo", level="sequence", micro_batches=3, beta=0.05),
    Case("bnpo"),
    Case("bnpo", micro_batches=6, even=True, beta=0.1),
    Case(entropy_coef=0.05),
    Case("grpo", entropy_coef=-0.05, beta=0.1),
    Case(entropy_coef=0.05, micro_batches=6, even=True),
    Case(top_entropy_quantile=0.3),
    Case("grpo", top_entropy_quantile=0.3, entropy_coef=0.05, beta=0.1),
    *(Case(loss, masked=True, micro_batches=m) for loss in ("dapo", "grpo", "dr_grpo") for m in (1, 6)),
    Case("grpo", masked=True, beta=0.1, entropy_coef=0.05),
    *(Case(engine=e, micro_batches=3) for e in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    Case("vespo", engine="token_truncate", micro_batches=2),
    Case("grpo", engine="sequence_mask", beta=0.1, level="sequence"),
    Case(packing="padded", beta=0.1, entropy_coef=0.05),
    *(Case(loss, steps=3) for loss in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo")),
    *(Case(loss, steps=4, passes=2) for loss in ("dapo", "grpo", "bnpo")),
    Case("luspo", level="sequence", steps=2, beta=0.05),
    Case(passes=2, beta=0.1),
    Case(steps=2, micro_batches=3, beta=0.1, engine="token_mask"),
    Case("grpo", steps=6, entropy_coef=0.05, level="sequence"),
    Case(steps=3, masked=True, packing="padded"),
]


def described(case: Case) -> str:
    fresh = Case()
    return "-".join(f"{n}={v}" for n, v in vars(case).items() if v != getattr(fresh, n)) or "default"


def episodes(policy: Any, case: Case) -> list[Group]:
    """Groups of conversations: prompt, model, world, model; some of them with something said after the last turn."""
    rng, groups = random.Random(0), []
    for task, rewards in enumerate(REWARDS):
        prompt = [rng.randrange(3, 60) for _ in range(rng.randint(4, 24))]
        members = []
        for number, parts in enumerate(rewards):
            cut = case.masked and number == task % 4
            lengths = [5, 3, 6] if case.even else [rng.randint(1, 9) for _ in range(3)]
            first, said, last = ([rng.randrange(3, 60) for _ in range(n)] for n in lengths)
            turns = [("prompt", prompt), ("model", first), ("env", said), ("model", last if cut else [*last, END])]
            members.append(_trajectory(policy, case, task, turns, parts, Stop.MAX_TOKENS if cut else Stop.TERMINATED))
        groups.append(Group(task, tuple(members)))
    return groups


@torch.no_grad()
def _trajectory(
    policy: Any, case: Case, task: int, turns: Sequence[tuple[Any, list[int]]], parts: Sequence[float], stop: Stop
) -> Trajectory:
    """The engine's logprobs are the policy's, or, where the case says so, some way off."""
    ids = [t for _, own in turns for t in own]
    logp = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    if case.engine:
        logp = logp + torch.randn(logp.shape, generator=torch.Generator().manual_seed(len(ids))) * 0.4
    segments, at = [], 0
    for author, own in turns:
        known = (tuple(logp[at - 1 : at - 1 + len(own)].tolist()), (0,) * len(own)) if author == "model" else ()
        segments.append(Segment(author, tuple(own), *known))
        at += len(own)
    return Trajectory(task, tuple(segments), (), stop, dict(zip(PARTS, parts, strict=True)))


def policies(case: Case) -> tuple[Any, Any]:
    """The reference, and the policy that has moved away from it."""
    reference = qwen3(vocab_size=64).eval()
    policy = copy.deepcopy(reference)
    if case.beta:
        torch.manual_seed(1)
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.02 * torch.randn_like(p))
    return reference, policy


def ledger(groups: Sequence[Group], case: Case) -> Credit:
    return assign_credit(
        groups,
        ADVANTAGES[case.advantage],
        reduce=lambda lengths: reduce_rows(LOSSES[case.loss], lengths, LONGEST),
        mask_stop_reasons=frozenset({Stop.MAX_TOKENS} if case.masked else ()),
        cut=case.cut,
    )


def ours(groups: Sequence[Group], case: Case, reference: Any, policy: Any) -> tuple[float, dict[str, Tensor], Any]:
    trained = copy.deepcopy(reference)
    recorder = Recorder(trained.parameters(), lr=STEP)
    recorder.moves = case.steps * case.passes > 1
    settings = LossSettings(
        case.loss,
        importance_level=case.level,
        epsilon_high=5.0 if case.loss == "cispo" else 0.28,
        beta=case.beta,
        importance_sampling_mode=case.engine or "token_truncate",
        importance_sampling_max=1.5 if case.engine else 2.0,
        entropy_coef=case.entropy_coef,
        top_entropy_quantile=case.top_entropy_quantile,
        longest=LONGEST,
        max_grad_norm=1e9,
        threads=1,
        max_tokens_per_microbatch=150,
        packing=case.packing,
        num_iterations=case.passes,
    )
    learner = Learner(trained, [recorder], settings)
    trained.load_state_dict(policy.state_dict())
    credit = ledger(groups, case)
    told = learner.update(credit.samples(), credit.weights(), credit.updates())
    return told["loss"], _by_step(recorder, trained), told


def _by_step(recorder: Recorder, model: Any) -> dict[str, Tensor]:
    """Every gradient, by the optimizer step and the parameter."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {f"{step} {names[i]}": g for step, seen in enumerate(recorder.all_seen) for i, g in seen.items()}


def theirs(
    groups: Sequence[Group], case: Case, reference: Any, policy: Any, folder: Path
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    trl = pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[bench]"')
    from datasets import Dataset

    members = [t for g in groups for t in g]
    reference.save_pretrained(folder / "reference")
    trained = type(reference).from_pretrained(folder / "reference")
    recorder = Recorder(trained.parameters(), lr=STEP)
    recorder.moves = case.steps * case.passes > 1
    losses: list[float] = []

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **more: Any) -> Tensor:
            loss: Tensor = super().compute_loss(*args, **more)
            losses.append(float(loss.detach()))
            return loss

    def roll_out(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        assert prompts == [str(t.task) for t in members]
        own = [[s for s in t.segments if s.author != "prompt"] for t in members]
        return {
            "prompt_ids": [list(t.segments[0].token_ids) for t in members],
            "completion_ids": [[i for s in its for i in s.token_ids] for its in own],
            "logprobs": [[p for s in its for p in s.logprobs or (0.0,) * len(s.token_ids)] for its in own],
            "env_mask": [[int(s.author == "model") for s in its for _ in s.token_ids] for its in own],
        }

    scale = {"grpo": "group", "batch": "batch", "dr_grpo": "none", "gdpo": "group"}[case.advantage]
    trainer = Trainer(
        model=trained,
        args=trl.GRPOConfig(
            output_dir=str(folder / "out"),
            max_steps=case.steps * case.passes,
            per_device_train_batch_size=len(members) // case.micro_batches // case.steps,
            gradient_accumulation_steps=case.micro_batches,
            steps_per_generation=case.micro_batches * case.steps,
            num_iterations=case.passes,
            lr_scheduler_type="constant",
            logging_steps=1,
            num_generations=len(REWARDS[0]),
            max_completion_length=LONGEST,
            loss_type=case.loss,
            importance_sampling_level=case.level,
            scale_rewards=scale,
            multi_objective_aggregation="normalize_then_sum" if case.advantage == "gdpo" else "sum_then_normalize",
            epsilon=0.2,
            epsilon_high=5.0 if case.loss == "cispo" else 0.28,
            beta=case.beta,
            entropy_coef=case.entropy_coef,
            top_entropy_quantile=case.top_entropy_quantile,
            mask_truncated_completions=case.masked,
            vllm_importance_sampling_mode=case.engine or "sequence_mask",
            vllm_importance_sampling_clip_max=1.5,
            max_grad_norm=0.0,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        reward_funcs=[reward(name, members) for name in PARTS],
        train_dataset=Dataset.from_list([{"prompt": str(g.task)} for g in groups]),
        processing_class=tokenizer(),
        rollout_func=roll_out,
        optimizers=(recorder, None),
    )
    if case.engine:  # its correction of vLLM's logprobs, with those of the rollouts
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    trained.load_state_dict(policy.state_dict())
    trained.eval()
    trainer.train()
    logged = next(line for line in trainer.state.log_history if "entropy" in line)
    return sum(losses) / (case.steps * case.passes), _by_step(recorder, trained), logged


def cut_as_ours(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's order of the rows is random: here it is that of our own cut."""
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")

    def ordered(batch: dict[str, Any]) -> dict[str, Any]:
        updates = case.cut.assign(len(batch["advantages"]))
        order = sorted(range(len(updates)), key=updates.__getitem__)
        return {
            name: value if value is None or (isinstance(value, Tensor) and value.ndim == 0) else value[order]
            for name, value in batch.items()
        }

    if case.steps > 1:
        monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", ordered)


def reward(name: str, members: Sequence[Trajectory]) -> Callable[..., list[float]]:
    def part(prompts: Sequence[str], **others: Any) -> list[float]:
        return [t.rewards[name] or 0.0 for t in members]

    part.__name__ = name
    return part


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": END, **{f"w{i}": i for i in range(2, 64)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


@pytest.mark.parametrize("case", CASES, ids=described)
def test_a_whole_batch_is_trls(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_as_ours(case, monkeypatch)
    reference, policy = policies(case)
    groups = episodes(policy, case)
    wanted, gradient, logged = theirs(groups, case, reference, policy, tmp_path)
    loss, found, told = ours(groups, case, reference, policy)
    assert max(float(g.abs().max()) for g in gradient.values()) > 1e-3
    assert loss == pytest.approx(wanted, abs=1e-5)
    for name, g in gradient.items():
        torch.testing.assert_close(found.get(name, torch.zeros_like(g)), g, atol=1e-5, rtol=1e-4)
    if case.advantage not in ("batch", "gdpo"):  # there TRL says it of the whole batch
        zero = metrics.group_metrics(groups)["frac_reward_zero_std"]
        assert zero == pytest.approx(logged["frac_reward_zero_std"])
    assert told["scored_tokens"] == sum(t.sampled_tokens for g in groups for t in g if not case.masks(t))
    if (
        case.beta or case.entropy_coef
    ) and case.micro_batches == case.steps == case.passes == 1:  # every scored row goes through both models
        assert told["entropy"] == pytest.approx(logged["entropy"], abs=1e-4)
