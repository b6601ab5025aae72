"""TRL's tests of GRPOTrainer's training, by TRL's names: settings, losses, models, adapters, metrics.

Each test is called as TRL's, and trains a random model of a few thousand weights for two steps. Cases that have no
counterpart are in test_grpo_refusals.py, with the reason. docs/from-trl.md counts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import Run, train
from tests.helpers.own_model import write_own_model
from tests.trl.trainer import CHATS, ROWS, different_letters, of_family, random_numbers, say, tiny, tokenizer, train_trl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def test_init_minimal(tmp_path: Path) -> None:
    run = train_trl(tmp_path, learning_rate=..., num_generations=..., per_device_train_batch_size=..., max_steps=1)
    assert len(run.rows) == 1


@pytest.mark.parametrize("family", ["cohere2", "glm4_moe", "qwen2", "qwen3_moe"])
def test_train(tmp_path: Path, family: str) -> None:
    run = train_trl(tmp_path, of_family(family), reward_funcs=random_numbers)
    assert run.metric("loss") is not None
    dense = {n: c for n, c in run.changed().items() if not any(w in n for w in ("expert", "gate", "router", "bias"))}
    assert all(dense.values()), [n for n, c in dense.items() if not c]  # an expert that nothing came to stays


@pytest.mark.parametrize("rows", [ROWS, CHATS], ids=["standard_prompt_only", "conversational_prompt_only"])
def test_train_dataset_format(tmp_path: Path, rows: Any) -> None:
    assert all(train_trl(tmp_path, train_dataset=rows).changed().values())


@pytest.mark.parametrize("loss", ["bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_train_loss_types(tmp_path: Path, loss: str) -> None:
    level = "sequence" if loss == "luspo" else "token"
    accumulated = {"gradient_accumulation_steps": 2, "max_completion_length": 32}
    run = train_trl(tmp_path, loss_type=loss, importance_sampling_level=level, **accumulated)
    assert run.metric("loss") is not None
    assert all(run.changed().values())


def test_train_multiple_iterations(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, num_iterations=2, max_steps=4).changed().values())


def test_train_with_additional_generation_kwargs(tmp_path: Path) -> None:
    sampling = {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1}
    run = train_trl(tmp_path, **sampling)
    assert all(run.changed().values())
    assert run.metric("sampling/sampling_logp_difference/max") < 1e-4


def test_train_vllm_structured_outputs(tmp_path: Path) -> None:
    run = train_trl(tmp_path, vllm_structured_outputs_regex=r"\n?[a-z ]{1,5}")
    assert run.metric("loss") is not None
    assert run.metric("sampling/sampling_logp_difference/max") < 1e-4


def test_train_peft_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    run = train_trl(tmp_path, model)
    changed = run.changed()
    assert all(c for n, c in changed.items() if "lora_" in n)
    assert not any(c for n, c in changed.items() if "lora_" not in n)


def test_train_peft_config(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = tmp_path / "model"
    tiny().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    small: dict[str, Any] = {
        "num_generations": 3,
        "per_device_train_batch_size": 3,
        "max_completion_length": 8,
        "max_steps": 1,
    }
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    train(
        "prompts",
        str(folder),
        reward_funcs=different_letters,
        train_dataset=ROWS,
        peft_config=lora,
        output_dir=str(tmp_path / "run"),
        eval={"every": 0, "final_tasks": 1},
        **small,
    )
    assert (tmp_path / "run/model/adapter_config.json").is_file()


def test_train_moe_peft_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    run = train_trl(tmp_path, peft.get_peft_model(of_family("qwen3_moe"), config), reward_funcs=random_numbers)
    assert all(c == ("lora_" in n) for n, c in run.changed().items())


def test_train_peft_with_gradient_checkpointing(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    run = train_trl(tmp_path, model, gradient_checkpointing=True)
    assert all(c == ("lora_" in n) for n, c in run.changed().items())


def test_train_with_sync_ref_model(tmp_path: Path) -> None:
    """The reference moves to the policy after two steps: the third one's KL is less than it would be."""
    same = {"beta": 0.1, "max_steps": 4}
    still = train_trl(tmp_path / "still", **same)
    synced = train_trl(tmp_path / "synced", sync_ref_model=True, ref_model_sync_steps=2, **same)
    assert all(synced.changed().values())
    assert synced.rows[1]["kl"] == pytest.approx(still.rows[1]["kl"])
    assert synced.rows[2]["kl"] < 0.9 * still.rows[2]["kl"]


def test_train_beta_non_zero(tmp_path: Path) -> None:
    run = train_trl(tmp_path, beta=0.1)
    assert all(run.changed().values())
    assert run.metric("kl") > 0


def test_train_with_pad_to_multiple_of(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, pad_to_multiple_of=8).changed().values())


def test_train_with_off_policy_mask(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, off_policy_mask_threshold=0.5).changed().values())


@pytest.mark.parametrize("bias_correction", [True, False])
def test_train_with_bias_correction_kl(tmp_path: Path, bias_correction: bool) -> None:
    assert all(train_trl(tmp_path, beta=0.1, use_bias_correction_kl=bias_correction).changed().values())


@pytest.mark.parametrize("tied", [False, True])
def test_train_with_cast_lm_head_to_fp32(tmp_path: Path, tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied).to(torch.bfloat16)
    run = train_trl(tmp_path, model, cast_lm_head_to_fp32=True, reward_funcs=random_numbers)
    assert sum(run.changed().values()) > 0.9 * len(run.changed())
    assert run.metric("loss") == run.metric("loss")  # a number


def test_train_with_static_entropy(tmp_path: Path) -> None:
    run = train_trl(tmp_path, entropy_coef=0.1)
    assert all(run.changed().values())
    assert run.metric("entropy") > 0


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "luspo"])
def test_entropy_bonus_scale(tmp_path: Path, loss: str) -> None:
    """The bonus is the coefficient times the mean entropy of a token, whatever the loss sums by."""
    level = "sequence" if loss == "luspo" else "token"
    same = {"loss_type": loss, "importance_sampling_level": level, "max_completion_length": 16, "max_steps": 1}
    without = train_trl(tmp_path / "without", **same)
    with_bonus = train_trl(tmp_path / "with", entropy_coef=0.5, **same)
    bonus = without.metric("loss") - with_bonus.metric("loss")
    assert bonus / with_bonus.metric("entropy") == pytest.approx(0.5, rel=0.05)


def test_entropy_bonus_flows_gradients(tmp_path: Path) -> None:
    """All rewards are the same: what moves the policy is the bonus alone."""
    same = {"reward_funcs": lambda completions, **_: [1.0] * len(completions), "max_steps": 1}
    assert not any(train_trl(tmp_path / "without", **same).changed().values())
    assert all(train_trl(tmp_path / "with", entropy_coef=0.1, **same).changed().values())


def test_train_with_entropy_filter(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, top_entropy_quantile=0.2).changed().values())


def test_train_normalize_then_sum_aggregation(tmp_path: Path) -> None:
    funcs = [different_letters, random_numbers]
    run = train_trl(tmp_path, reward_funcs=funcs, multi_objective_aggregation="normalize_then_sum")
    assert all(run.changed().values())


@pytest.mark.parametrize("scale", [False, "group", "batch", True, "none"])
def test_train_scale_rewards(tmp_path: Path, scale: object) -> None:
    assert all(train_trl(tmp_path, scale_rewards=scale).changed().values())


def test_train_with_mask_truncated_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, ["a b c d e f g h i j k l m n o p"], ["a b"], ["c"])
    run = train_trl(tmp_path, mask_truncated_completions=True, loss_type="dapo")
    assert sum(run.changed().values()) > 0.9 * len(run.changed())


def test_train_with_mask_truncated_completions_all_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, ["a b c d e f g h i j k l m n o p"], ["q r s t u v w x y z a b c d e"])
    run = train_trl(tmp_path, mask_truncated_completions=True, loss_type="dapo")
    assert not any(run.changed().values())


def test_train_num_generations_larger_than_batch_size(tmp_path: Path) -> None:
    run = train_trl(tmp_path, num_generations=6, gradient_accumulation_steps=2)
    assert all(run.changed().values())


def test_train_delta_clipping(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, delta=2.0).changed().values())


def test_train_multiple_dataloader_workers(tmp_path: Path) -> None:
    assert all(train_trl(tmp_path, dataloader_num_workers=2).changed().values())


def test_train_sequence_importance_sampling(tmp_path: Path) -> None:
    run = train_trl(tmp_path, num_iterations=2, max_steps=4, importance_sampling_level="sequence")
    assert all(run.changed().values())


def test_train_vllm_importance_sampling_correction(tmp_path: Path) -> None:
    """Its modes train; the engine here is the embedded one, whose logprobs are corrected by the same rule."""
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        run = train_trl(tmp_path / mode, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=3.0)
        assert all(run.changed().values())


def test_prepare_input_called_with_correct_data(tmp_path: Path) -> None:
    """A batch of 24 completions of 6 prompts is cut into 4 parts, and gone over twice."""
    seen: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.append(prompts)
        return random_numbers(completions, **columns)

    run = train_trl(
        tmp_path,
        reward_funcs=reward,
        steps_per_generation=4,
        num_generations=4,
        per_device_train_batch_size=6,
        num_iterations=2,
        max_steps=16,
    )
    assert len(run.rows) == 2
    trained = [prompts for prompts in seen if len(prompts) == 4]
    assert all(len(set(prompts)) == 1 for prompts in trained)
    assert len({prompts[0] for prompts in trained[:6]}) == 6


def test_train_with_adam_betas_and_a_warm_up_as_a_share(tmp_path: Path) -> None:
    run = train_trl(tmp_path, adam_beta2=0.95, warmup_steps=0.5, lr_scheduler_type="cosine", max_steps=4)
    rates = [row["learning_rate" if "learning_rate" in row else "lr"] for row in run.rows]
    assert rates[0] < max(rates)
    assert rates[-1] < max(rates)


def test_trust_remote_code(tmp_path: Path) -> None:
    """The model's class is code in its folder; the run's own folder is loaded again as it was."""
    small: dict[str, Any] = {"steps": 1, "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 8}}
    small["eval"] = {"every": 0, "final_tasks": 2}
    run = train(
        "math-tools",
        write_own_model(tmp_path / "own"),
        trust_remote_code=True,
        output_dir=str(tmp_path / "run"),
        **small,
    )
    assert run.config["load"]["trust_remote_code"] is True
    assert type(Run(run.folder).model).__name__ == "OwnModel"
