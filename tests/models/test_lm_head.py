"""Logits in float32 of weights in fewer bits: in the engine, in the learner, in what is saved."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.errors import UserError
from agentrl.models import policy
from agentrl.models.lm_head import build_lm_head, cast_head_to_fp32, find_backbone
from agentrl.resources import load_trainable_policy
from agentrl.settings.loader import build_config
from agentrl.types import SamplingParams
from tests.helpers.tiny import qwen3

IDS = torch.arange(6, 18)[None]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_a_product_in_float32(tied: bool) -> None:
    model = qwen3(tie_word_embeddings=tied).to(torch.bfloat16).eval()
    plain = model(IDS).logits
    cast_head_to_fp32(model)
    with torch.no_grad():
        states = find_backbone(model)(IDS).last_hidden_state
        expected = states.float() @ model.get_output_embeddings().weight.float().T
        assert torch.equal(build_lm_head(model)(states), expected)
        assert torch.equal(model(IDS).logits, expected)
        assert torch.equal(copy.deepcopy(model)(IDS).logits, expected)
    assert plain.dtype == torch.bfloat16
    assert (expected - plain.float()).abs().max() > 1e-3


async def test_the_engine_samples_from_them() -> None:
    model = qwen3(tie_word_embeddings=False).to(torch.bfloat16).eval()
    cast_head_to_fp32(model)
    async with TransformersEngine(model, capacity=2, max_context=64, threads=1) as engine:
        done = await engine.generate(IDS[0].tolist(), SamplingParams(1.0, 8, ()), session="a")
    ids = torch.tensor([[*IDS[0].tolist(), *done.token_ids]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, IDS.shape[1] - 1 : -1].log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), own, atol=0.15, rtol=0)  # bfloat16's rounding, twice


def test_what_is_saved_says_so_by_vllm_s_name(tmp_path: Path) -> None:
    config = build_config(
        ("test", {"env": "math-tools", "dtype": "bfloat16", "learner": {"cast_lm_head_to_fp32": True}})
    )
    trained = load_trainable_policy(config)
    trained.save(tmp_path)
    again = policy.load_policy(str(tmp_path), "bfloat16").model
    assert again.config.head_dtype == "float32"
    assert again(IDS).logits.dtype == torch.float32
    assert again.get_output_embeddings().weight.dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)(IDS).logits.dtype == torch.bfloat16


def test_an_adapter_s_folder_says_so_too(tmp_path: Path) -> None:
    """It has no config.json, and its base's says nothing: its logits would be rounded wherever it is evaluated."""
    settings = {"env": "math-tools", "dtype": "bfloat16", "lora": {"rank": 2}}
    trained = load_trainable_policy(build_config(("test", {**settings, "learner": {"cast_lm_head_to_fp32": True}})))
    trained.save(tmp_path / "first")
    again = policy.load_policy(str(tmp_path / "first"), "bfloat16")
    assert again.model(IDS).logits.dtype == torch.float32
    assert torch.equal(again.model(IDS).logits, trained.model(IDS).logits)
    again.save(tmp_path / "second")
    assert policy.load_policy(str(tmp_path / "second"), "bfloat16").model(IDS).logits.dtype == torch.float32
    load_trainable_policy(build_config(("test", settings))).save(tmp_path / "plain")
    assert policy.load_policy(str(tmp_path / "plain"), "bfloat16").model(IDS).logits.dtype == torch.bfloat16


def test_an_adapter_on_the_head_is_refused() -> None:
    model = peft.get_peft_model(qwen3(tie_word_embeddings=False), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UserError, match="only that of a plain linear layer is cast"):
        cast_head_to_fp32(model.get_base_model())
