"""A model's miniature: everything about it but its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
)

from agentrl.models.miniature import build_miniature, find_longest_window, shrink_settings, strip_settings
from tests.helpers.tiny import half, qwen3


def large(model_class: Any, config: Any) -> Any:
    """A model of that size, without the memory."""
    with torch.device("meta"):
        return model_class(config)


def test_a_model_of_any_size_becomes_a_small_one_with_as_many_layers() -> None:
    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    )
    small = build_miniature(large(Qwen2ForCausalLM, config))
    assert type(small) is Qwen2ForCausalLM
    assert small.config.num_hidden_layers == 24
    assert sum(p.numel() for p in small.parameters()) < 1_000_000
    assert {p.dtype for p in small.parameters()} == {torch.float32}
    assert small(torch.arange(60)[None]).logits.isfinite().all()


def test_windows_become_short_and_layers_keep_their_kinds() -> None:
    config = Gemma3TextConfig(num_hidden_layers=12, hidden_size=640, head_dim=256, num_attention_heads=4)
    small = build_miniature(large(Gemma3ForCausalLM, config))
    assert small.config.layer_types == config.layer_types
    assert small.config.sliding_window == 6
    assert small.config.query_pre_attn_scalar == config.query_pre_attn_scalar


def test_lists_of_angles_are_cut_to_the_dimensions_that_are_rotated() -> None:
    factors = [1.0 + i / 48 for i in range(48)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    config = Phi3Config(
        rope_parameters=rope, original_max_position_embeddings=4096, max_position_embeddings=131072, pad_token_id=0
    )
    small = build_miniature(large(Phi3ForCausalLM, config))
    assert small.config.rope_parameters["short_factor"] == factors[:8]
    assert small(torch.arange(40)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    "config", [LlamaConfig(), DeepseekV3Config(), MixtralConfig(), Qwen3NextConfig(), MambaConfig()], ids=repr
)
def test_what_is_small_already_stays(config: Any) -> None:
    once = shrink_settings(strip_settings(config))
    assert shrink_settings(once) == once


def test_its_weights_let_nothing_hide() -> None:
    small = build_miniature(half())
    for name, parameter in small.named_parameters():
        assert parameter.std() > 0.05, name
    states = small.model(torch.arange(50)[None]).last_hidden_state
    assert states.std() > 0.3


def test_it_is_the_same_each_time_and_leaves_the_dice_alone() -> None:
    state = torch.get_rng_state()
    one, other = (build_miniature(qwen3()) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_longest_window_is_found_wherever_it_is_named() -> None:
    assert find_longest_window(LlamaConfig()) == 0
    assert find_longest_window(Gemma3TextConfig(sliding_window=512)) == 512
