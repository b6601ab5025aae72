from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.learner import logprobs
from agentrl.learner.logprobs import token_logprobs
from agentrl.learner.packing import MicroBatch
from agentrl.learner.sampling_rules import SamplingRules
from agentrl.models.kept_tokens import decode_kept, encode_kept
from agentrl.models.lm_head import LmHead, NotProven, build_lm_head, cast_head_to_fp32, unwrap_model
from agentrl.types import KeptTokens, Sample

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


@dataclass
class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations made and that are alive, after each of them."""

    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.alive = {at: entry for at, entry in self.alive.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return made


class Loud(nn.Linear):
    """A layer that is no plain one, though it does the same."""


def brute_force(
    head: LmHead, states: Tensor, targets: Tensor, temperature: float, rules: SamplingRules | None
) -> tuple[Tensor, Tensor]:
    """Compute both in double precision, a token at a time, by autograd."""
    layer: Any = head.layer
    found = []
    for at, (state, target) in enumerate(zip(states, targets.tolist(), strict=True)):
        bias = 0.0 if layer.bias is None else layer.bias.double()
        logits = (layer.weight.double() @ state.double() + bias) * head.scale
        logits = logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)
        if rules is not None:
            seen = sorted(set(rules.batch.rows[0].token_ids[: at + 1]))
            penalty = torch.where(logits[seen] < 0, rules.repetition_penalty, 1 / rules.repetition_penalty)
            logits = logits.index_put((torch.tensor(seen),), logits[seen] * penalty)
        logprobs = logits / temperature
        kept = torch.ones(len(logits), dtype=torch.bool)
        if rules is not None and rules.batch.kept[at] is not None:
            (kept,) = decode_kept([rules.batch.kept[at]], len(logits), torch.device("cpu"))
        inside = logprobs[kept].log_softmax(-1)
        found.append((inside[int(kept[:target].sum())], -(inside.exp() * inside).sum()))
    logprobs, entropies = zip(*found, strict=True)
    return torch.stack(logprobs), torch.stack(entropies)


def gradients_of(
    compute: Callable[[Tensor], tuple[Tensor, Tensor]], layer: nn.Linear, states: Tensor, *, entropy: bool
) -> list[Tensor]:
    """Both numbers, and the gradients of a weighted sum of them."""
    layer.zero_grad()
    states = states.clone().requires_grad_()
    logprobs, entropies = compute(states)
    weights = torch.linspace(-1, 1, len(states), dtype=logprobs.dtype)
    total = (weights * logprobs).sum() + ((weights.flip(0) * entropies).sum() if entropy else 0.0)
    torch.autograd.backward(total)
    grads = [states.grad, *(p.grad for p in layer.parameters())]
    return [t.detach().double() for t in (logprobs, entropies, *(g for g in grads if g is not None))]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    budget=st.sampled_from([1, 1500, 1 << 29]),
    block=st.sampled_from([1, 700, 1 << 21]),
    temperature=st.sampled_from([1.0, 0.7, 1.6]),
    scale=st.sampled_from([1.0, 0.25]),
    cap=st.sampled_from([None, 3.0]),
    penalty=st.sampled_from([1.0, 1.4]),
    truncates=st.booleans(),
    bias=st.booleans(),
    entropy=st.booleans(),
    kind=st.sampled_from([nn.Linear, Loud]),
)
def test_values_and_gradients_are_those_of_brute_force(
    seed: int, budget: int, block: int, temperature: float, scale: float, cap: float | None, penalty: float,
    truncates: bool, bias: bool, entropy: bool, kind: type[nn.Linear],
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    layer, states, targets = kind(6, 40, bias=bias), 3 * torch.randn(9, 6), torch.randint(0, 40, (9,))
    kept = torch.rand(9, 40) < 0.3
    kept[torch.arange(9), targets] = True
    sets = [*KeptTokens.collect(encode_kept(kept)).sets()] if truncates else []
    row = Sample([3, *targets.tolist()], [0] + [1] * 9, [0.0] * 10, [1.0] * 10, [None, *sets] if sets else [])
    rules = SamplingRules(MicroBatch.read([row]), penalty) if truncates or penalty != 1.0 else None
    head = LmHead(layer, scale, cap)
    assert (head.linear is None) == (kind is Loud)

    def ours(states: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head, states, targets, temperature, rules=rules, entropy_gradient=entropy)

    wanted = gradients_of(lambda s: brute_force(head, s, targets, temperature, rules), layer, states, entropy=entropy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "LOGITS_BYTES", budget)
        patch.setattr(logprobs, "BLOCK_BYTES", block)
        found = gradients_of(ours, layer, states, entropy=entropy)
        with torch.no_grad():
            again = ours(states)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=3e-6)
    for one, other in zip(found, again, strict=False):
        assert torch.equal(one, other.double())


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("count", "words"), [(512, 262_144), (700, 262_144)])
def test_logits_of_a_large_vocabulary_are_held_once(count: int, words: int, entropy: bool) -> None:
    """Beside inputs and their gradients: forward and backward, whether all fit the budget or not."""
    torch.manual_seed(0)
    layer, states, targets = nn.Linear(4, words, bias=False), torch.randn(count, 4), torch.randint(0, words, (count,))
    states.requires_grad_()
    with LiveBytes() as live:
        values, entropies = token_logprobs(LmHead(layer), states, targets, entropy_gradient=entropy)
        torch.autograd.backward(values.sum() + (entropies.sum() if entropy else 0.0))
    assert 256 << 20 < live.peak < 600 << 20
    some = slice(0, 40)
    exact = (states[some].double() @ layer.weight.double().T).log_softmax(-1)
    torch.testing.assert_close(values[some].double(), exact.gather(1, targets[some, None])[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies[some].double(), -(exact.exp() * exact).sum(-1), rtol=1e-6, atol=1e-6)


def test_who_asks_twice_for_gradients_gets_the_same() -> None:
    layer, states = nn.Linear(6, 40), torch.randn(5, 6, requires_grad=True)
    for head in (LmHead(layer), layer):
        values, _ = token_logprobs(head, states, torch.arange(5))
        first, second = (torch.autograd.grad(values.sum(), states, retain_graph=True)[0] for _ in range(2))
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("budget", [1, 1 << 29])
def test_a_head_in_half_precision_multiplies_in_it_and_a_cast_one_does_not(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", budget)
    lm = model().bfloat16()
    ids, trained = rows()
    states, targets = predicting(lm, ids, trained)
    states = states.detach().requires_grad_()
    for cast in (False, True):
        if cast:
            cast_head_to_fp32(lm)
        head = build_lm_head(lm)
        assert head.linear is not None
        found, _ = token_logprobs(head, states, targets)
        plain = head(states).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-5)
        for one, other in zip(*(torch.autograd.grad(v.sum(), [states, lm.lm_head.weight]) for v in (found, plain)),
                              strict=True):  # fmt: skip
            assert one.dtype == other.dtype == torch.bfloat16
            torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.03 * float(other.abs().max()))


def test_a_frozen_or_watched_layer_is_what_it_was() -> None:
    """A frozen one gets no gradient; one with a hook is called."""
    layer, states = nn.Linear(6, 40), torch.randn(5, 6, requires_grad=True)
    layer.requires_grad_(False)
    values, _ = token_logprobs(LmHead(layer), states, torch.arange(5))
    torch.autograd.backward(values.sum())
    assert layer.weight.grad is None
    assert states.grad is not None
    layer.register_forward_hook(lambda module, given, out: out * 2)
    doubled, _ = token_logprobs(LmHead(layer), states, torch.arange(5))
    assert not torch.allclose(doubled, values)


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
