from typing import Any

import pytest
import torch
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.learner import logprobs
from agentrl.learner.logprobs import token_logprobs
from agentrl.models.lm_head import NotProven, build_lm_head, unwrap_model

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def model(kind: Any = Qwen3ForCausalLM, config: Any = Qwen3Config, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(config(**SHAPE, **more))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    trained = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    trained[:, 0] = False
    trained[1, 5:] = False
    ids[1, 5:] = 0  # padding
    return ids, trained


def predicting(lm: Any, ids: torch.Tensor, trained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before the trained tokens, and those tokens."""
    hidden = lm.base_model(input_ids=ids).last_hidden_state
    return hidden[:, :-1][trained[:, 1:]], ids[:, 1:][trained[:, 1:]]


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Qwen3ForCausalLM, Qwen3Config), (Gemma2ForCausalLM, Gemma2Config), (CohereForCausalLM, CohereConfig)],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_those_of_the_whole_forward_pass(kind: Any, config: Any, temperature: float) -> None:
    lm = model(kind, config)
    ids, trained = rows()
    found, entropy = token_logprobs(build_lm_head(lm), *predicting(lm, ids, trained), temperature)
    full = (lm(input_ids=ids).logits.float() / temperature).log_softmax(-1)
    expected = full[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found, expected[trained[:, 1:]])
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1)[:, :-1][trained[:, 1:]])


def test_in_chunks_they_and_their_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, trained = rows()
    found = []
    for chunk in (4096, 4):
        monkeypatch.setattr(logprobs, "CHUNK", chunk)
        lm = model()
        values, entropy = token_logprobs(build_lm_head(lm), *predicting(lm, ids, trained))
        torch.autograd.backward(values.square().sum())
        found.append([values, entropy, *(p.grad for p in lm.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts)


def test_a_head_that_does_something_else_is_refused() -> None:
    class Sharpened(Qwen3ForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 2
            return out

    with pytest.raises(NotProven, match="it does more to its logits than"):
        build_lm_head(model(Sharpened))


def test_the_comparison_leaves_the_model_as_it_was() -> None:
    lm = model(attention_dropout=0.5).train()
    build_lm_head(lm)
    assert lm.training
    assert not lm.model._forward_hooks
    assert all(p.grad is None for p in lm.parameters())


def test_a_wrapper_of_adapters_is_looked_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def get_base_model(self) -> nn.Module:
            return self.inner

    lm = model()
    assert unwrap_model(Wrapper(lm)) is lm
    states = torch.randn(3, 32)
    torch.testing.assert_close(build_lm_head(Wrapper(lm))(states), build_lm_head(lm)(states))
