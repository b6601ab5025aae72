"""Policies given as objects, and weights in fewer bits."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertLMHeadModel

from agentrl import EnvSpec, UserError, evaluate, train
from agentrl.engines.vllm.weight_sender import PolicyWeights
from agentrl.models import lora, policy
from agentrl.models.source import locate_model
from agentrl.resources import open_resources
from agentrl.settings.loader import build_config
from agentrl.types import SamplingParams
from tests.helpers.tiny import qwen3

SMALL: dict[str, Any] = {
    "steps": 1,
    "rollout": {"tasks_per_step": 4, "group_size": 3},
    "eval": {"final_tasks": 2, "every": 0},
    "learner": {"lr": 1e-3},
}


@pytest.mark.slow
def test_a_loaded_model_is_trained_in_place(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(locate_model("nano"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train("math-tools", model, run={"dir": str(tmp_path / "run")}, **SMALL)
    assert not all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"] == locate_model("nano")
    assert evaluate("math-tools", model, tasks=4, out=str(tmp_path / "eval")).episodes == 4


@pytest.mark.long
def test_a_loaded_model_s_own_adapter_is_trained(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(locate_model("nano"))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    frozen = base.model.norm.weight.detach().clone()
    tokenizer = AutoTokenizer.from_pretrained(locate_model("nano"))
    train("math-tools", model, tokenizer=tokenizer, run={"dir": str(tmp_path / "run")}, **SMALL)
    assert torch.equal(base.model.norm.weight, frozen)
    assert any(p.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a causal LM of transformers, not Linear"):
        train("math-tools", torch.nn.Linear(2, 2), **SMALL)
    with pytest.raises(UserError, match="a Qwen3ForCausalLM, has no name, and so no tokenizer; give one"):
        train("math-tools", qwen3(), **SMALL)


def test_bert_is_loaded_as_a_decoder_whatever_its_folder_says(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertLMHeadModel(BertConfig(**sizes, vocab_size=128, initializer_range=0.3)).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(locate_model("nano")).save_pretrained(tmp_path / "bert")
    assert not json.loads((tmp_path / "bert" / "config.json").read_text()).get("is_decoder")
    loaded = policy.load_policy(str(tmp_path / "bert"))
    loaded.save(tmp_path / "saved")
    again = policy.load_policy(str(tmp_path / "saved"))
    ids = torch.arange(5, 25)[None]
    for model in (loaded.model, again.model):
        assert model.config.is_decoder
        with torch.no_grad():
            torch.testing.assert_close(model(ids[:, :10]).logits, model(ids).logits[:, :10])  # none sees those behind
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["is_decoder"]


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [(7, [8, 7], (8, 7)), (7, None, (7,)), ([7, 9], 8, (8, 7, 9)), (None, None, ())],
)
def test_the_ends_of_a_turn_are_those_of_every_config_that_a_model_ships(
    tmp_path: Path, config: Any, generation: Any, ends: tuple[int, ...]
) -> None:
    model = qwen3(eos_token_id=config)
    model.generation_config.eos_token_id = generation
    model.save_pretrained(tmp_path)
    assert policy.load_end_tokens(str(tmp_path)) == ends
    assert set(policy.Policy(model, None, "").end_tokens) == set(ends)


async def test_a_run_ends_a_turn_with_a_token_that_the_generation_config_names() -> None:
    """Qwen3-instruct's <|endoftext|> used to be sampled through, to the limit, and was called `length`."""
    model = AutoModelForCausalLM.from_pretrained(locate_model("nano"))
    tokenizer = AutoTokenizer.from_pretrained(locate_model("nano"))
    config = build_config(("test", {"env": "math-tools", "model": "nano"}))
    end = tokenizer.convert_tokens_to_ids("<|im_start|>")  # a special token that no source named so far
    model.generation_config.eos_token_id = [model.config.eos_token_id, end]
    async with open_resources(config, EnvSpec("math-tools"), policy.wrap_policy(model, tokenizer)) as session:
        params = SamplingParams(0.0, 20, tuple(session.renderer.get_stop_token_ids()))
        asked = session.renderer.render_ids([{"role": "system", "content": "Be good."}])
        done = await session.engine.generate(
            asked[:-3], params, session="a"
        )  # it is asked for the next turn's beginning
    assert (done.token_ids[-1], done.stop_reason) == (end, "stop")


@pytest.fixture(params=[True, False], ids=["avx512_bf16", "plain"])
def any_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes takes the CPU at hand for one of either kind: it packs weights anew on the first."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: request.param)


@pytest.mark.slow
@pytest.mark.usefixtures("any_cpu")
def test_a_base_in_4_bits_is_trained_by_its_adapter(tmp_path: Path) -> None:
    adapter = {"rank": 4, "quantize": "4bit"}
    train("math-tools", lora=adapter, run={"dir": str(tmp_path / "run")}, **SMALL)
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    off = [row["sampling/sampling_logp_difference/max"] for row in rows if "grad_norm" in row]
    assert off
    assert max(off) < 1e-4  # what samples is what is trained
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()
    run, out = str(tmp_path / "run"), str(tmp_path / "eval")
    assert evaluate("math-tools", run, tasks=4, out=out, lora={"quantize": "4bit"}).episodes == 4
    with pytest.raises(UserError, match=r"not trained themselves; give lora\.rank too"):
        train("math-tools", lora={"quantize": "4bit"}, **SMALL)


@pytest.mark.usefixtures("any_cpu")
@pytest.mark.parametrize("before", ["loaded", "given"])
def test_what_is_sent_of_a_base_in_4_bits_are_the_values_it_stands_for(before: str) -> None:
    packed = policy.load_policy("nano", quantize="4bit").model if before == "loaded" else _given_in_4_bits()
    sent = dict(PolicyWeights(packed))
    plain = AutoModelForCausalLM.from_pretrained(locate_model("nano"), dtype=torch.float32)
    own = dict(PolicyWeights(plain))
    assert {n: t.shape for n, t in sent.items()} == {n: t.shape for n, t in own.items()}
    plain.load_state_dict(sent, strict=False)
    plain.tie_weights()
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, packed(ids).logits, atol=1e-3, rtol=1e-3)
    assert not any(getattr(p.quant_state, "packing_format_for_cpu", False) for p in _in_4_bits(packed))


@pytest.mark.usefixtures("any_cpu")
def test_a_gradient_through_a_base_in_4_bits_is_that_of_its_values() -> None:
    packed = policy.load_policy("nano", quantize="4bit").model
    plain = AutoModelForCausalLM.from_pretrained(locate_model("nano"), dtype=torch.float32)
    plain.load_state_dict(dict(PolicyWeights(packed)), strict=False)
    plain.tie_weights()
    found = []
    for model in (packed, plain):
        with torch.no_grad():
            model(torch.arange(5, 40)[None])  # a pass without a gradient, as an engine makes
        inputs = model.get_input_embeddings()(torch.arange(5, 40)[None]).detach().requires_grad_()
        torch.autograd.backward(model(inputs_embeds=inputs).logits.square().mean())
        found.append(inputs.grad)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


def _given_in_4_bits() -> Any:
    """A model as a user loads it: it has computed already, and so packed its weights where the CPU wants that."""
    quantized = AutoModelForCausalLM.from_pretrained(
        locate_model("nano"),
        dtype=torch.float32,
        quantization_config=lora.build_quantization(torch.float32),
        device_map={"": "cpu"},
    )
    if has_avx512bf16():  # the real one: the product itself is made of these instructions
        with torch.no_grad():
            quantized(torch.arange(5, 40)[None])
    return policy.wrap_policy(quantized).model


def _in_4_bits(model: Any) -> list[Any]:
    found = [p for p in model.parameters() if hasattr(p, "quant_state")]
    assert found
    return found


def test_a_skeleton_has_everything_but_values() -> None:
    real, room = policy.load_policy("nano").model, policy.load_policy("nano", skeleton=True).model
    assert [(n, p.shape, p.dtype, p.device) for n, p in real.named_parameters()] == [
        (n, p.shape, p.dtype, p.device) for n, p in room.named_parameters()
    ]
    assert [(n, b.shape, b.dtype) for n, b in real.named_buffers()] == [
        (n, b.shape, b.dtype) for n, b in room.named_buffers()
    ]
    assert room.get_output_embeddings().weight is room.get_input_embeddings().weight
    assert not room.training
