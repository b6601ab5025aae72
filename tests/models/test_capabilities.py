"""What a model is, found out by changing tokens and looking who moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.model_view import run_through_slots
from agentrl.errors import UserError
from agentrl.learner.hidden_states import (
    ALONE,
    EACH_TOKEN,
    PADDED,
    Packing,
    choose_plain_packing,
    prove_prefix_sharing,
)
from agentrl.learner.learner import Learner, LossSettings
from agentrl.models import capabilities, miniature
from agentrl.models.capabilities import Capabilities, NotTestable, find_proof
from agentrl.models.lm_head import NotProven
from agentrl.models.perturbation import run_own_states
from agentrl.models.position_mixing import AttentionCall
from tests.helpers.causal_lms import learned, sampled, subject
from tests.helpers.tiny import SHAPE, VOCABULARY, half, llama, qwen3, sliding

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "mixer", "dtype"),
    [
        ("qwen3_5_text", "Qwen3_5GatedDeltaNet", torch.bfloat16),
        ("qwen3_5_text", "Qwen3_5GatedDeltaNet", torch.float32),
        ("lfm2", "Lfm2ShortConv", torch.bfloat16),
        ("falcon_mamba", "FalconMambaMixer", torch.float32),
        ("granitemoehybrid", "GraniteMoeHybridMambaLayer", torch.float32),
        ("mpt", "MptAttention", torch.float32),
    ],
)
def test_a_module_that_mixes_positions_beside_attention_is_named(name: str, mixer: str, dtype: torch.dtype) -> None:
    model = subject(name).to(dtype)
    why = rf"^{mixer} mixes positions, and not by transformers' attention interface$"
    with pytest.raises(NotProven, match=why):
        prove_prefix_sharing(model)


async def test_a_window_that_the_mask_alone_has_is_found() -> None:
    """Phimoe's attention is not told of it."""
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"} | {"num_local_experts": 4, "vocab_size": 128}
    open_ended = PhimoeForCausalLM(PhimoeConfig(**shape, sliding_window=None)).eval()
    prove_prefix_sharing(open_ended)
    assert await sampled(open_ended, TransformersEngine(open_ended)) < 1e-4
    model = PhimoeForCausalLM(PhimoeConfig(**shape, sliding_window=16)).eval()
    with pytest.raises(NotProven, match="the mask of PhimoeAttention hides more than the window"):
        prove_prefix_sharing(model)
    with pytest.warns(UserWarning, match="goes the plain way, with .*: the mask of PhimoeAttention hides more"):
        engine = TransformersEngine(model)
    assert await sampled(model, engine) < 1e-4


@pytest.mark.parametrize("name", ["opt", "bart", "falcon_mamba", "llama4_text"])
def test_models_that_ended_in_a_raw_error_are_trained_right(name: str) -> None:
    model = subject(name)
    assert choose_plain_packing(model) == (PADDED, "")
    assert learned(model, PADDED) < 1e-4


@pytest.mark.parametrize(
    ("name", "packing", "why"),
    [
        ("bert", ALONE, "each row goes through it alone: it does more to its logits than its output layer"),
        ("cpmant", EACH_TOKEN, "each trained token costs a pass over all before it: a token's state depends on"),
    ],
)
def test_a_model_that_cannot_be_packed_is_trained_the_plain_way(name: str, packing: Packing, why: str) -> None:
    model = subject(name)
    with pytest.warns(UserWarning, match=f"is trained the plain way; {why}"):
        learner = Learner(model, [], LossSettings(threads=1))
    assert learner.packing.plain is packing
    assert learned(model, packing) < 1e-4


def test_an_encoder_is_refused_with_the_way_out() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertLMHeadModel(BertConfig(**sizes, vocab_size=VOCABULARY)).eval()
    why = r"BertLMHeadModel: as its settings are it is an encoder, .* load it as a decoder: is_decoder=True"
    with pytest.raises(UserError, match=f"^agentrl cannot train {why}"):
        Learner(model, [], LossSettings(threads=1))
    with pytest.raises(UserError, match=f"^the embedded engine cannot run {why}.* --engine vllm"):
        TransformersEngine(model)


def test_a_model_that_gives_other_logits_each_time_is_refused() -> None:
    class Dice(Qwen3ForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + torch.rand_like(out.logits)
            return out

    model = Dice(Qwen3Config(**SHAPE)).eval()
    with pytest.raises(UserError, match="cannot train Dice: it gives other logits each time that it is asked"):
        Learner(model, [], LossSettings(threads=1))


def test_a_way_by_which_a_row_reaches_another_is_found() -> None:
    """However little it is: a thousandth of what the others hold."""

    def leaking(model: Any, rows: list[list[int]]) -> list[Tensor]:
        states = run_own_states(model, rows)
        return [own + 1e-3 * other.mean(0) for own, other in zip(states, [*states[1:], states[0]], strict=True)]

    with pytest.raises(NotProven, match="the states of a row move when another row is changed"):
        Capabilities(qwen3()).prove_kind(leaking)


def test_one_token_that_is_wrong_is_enough() -> None:
    def wrong(model: Any, rows: list[list[int]]) -> list[Tensor]:
        states = run_own_states(model, rows)
        states[0][-1] *= 1.05
        return states

    with pytest.raises(NotProven, match="its states are off by"):
        Capabilities(qwen3()).prove_kind(wrong)
    with pytest.raises(NotProven, match="its states are off by"):
        Capabilities(qwen3()).prove_itself(wrong)
    Capabilities(qwen3()).prove_kind(run_own_states, gradient=True)
    Capabilities(half()).prove_itself(run_own_states, gradient=True)


def test_a_gradient_that_is_cut_off_is_found() -> None:
    def cut(model: Any, rows: list[list[int]]) -> list[Tensor]:
        return [states + 0.5 * (states.detach() - states) for states in run_own_states(model, rows)]

    with pytest.raises(NotProven, match=r"its gradient is off by 0\.5"):
        Capabilities(qwen3()).prove_kind(cut, gradient=True)
    Capabilities(qwen3()).prove_kind(cut)


def test_a_long_window_costs_no_long_pass() -> None:
    """The proof runs a miniature, and a hundred tokens or so through the model itself."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE | {"max_position_embeddings": 8192}, sliding_window=4096)).eval()
    passes: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *call: passes.append(call[2].shape[0] * call[2].shape[1]))
    Capabilities(model).prove_kind(run_through_slots)
    assert sum(passes) == 0
    assert find_proof(model).model.config.sliding_window < len(find_proof(model).rows[0]) // 4
    choose_plain_packing(model)
    prove_prefix_sharing(model)
    assert 0 < sum(passes) < 500


def test_a_kind_of_model_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = miniature.build_miniature

    def counted(model: Any) -> Any:
        made.append(model)
        return make(model)

    monkeypatch.setattr(capabilities, "build_miniature", counted)
    monkeypatch.setattr(capabilities, "_PROOFS", type(capabilities._PROOFS)())
    for model in (qwen3(), qwen3(), qwen3(rms_norm_eps=1e-5)):
        prove_prefix_sharing(model)
        TransformersEngine(model)
    assert len(made) == 2


def test_where_no_miniature_can_be_made_the_model_itself_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(model: Any) -> Any:
        raise KeyError("unheard_of")

    monkeypatch.setattr(capabilities, "build_miniature", impossible)
    monkeypatch.setattr(capabilities, "_PROOFS", type(capabilities._PROOFS)())
    for model in (llama(), half()):
        choose_plain_packing(model)
        prove_prefix_sharing(model)
        TransformersEngine(model)
    choose_plain_packing(sliding())
    windowed = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=100))
    choose_plain_packing(windowed)
    with pytest.raises(NotTestable, match=r"it has windows of 100 tokens, of which no small copy .* \(KeyError: "):
        prove_prefix_sharing(windowed)


def test_a_model_is_left_as_it_was() -> None:
    model = qwen3().train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    state, attention = torch.get_rng_state(), model.config._attn_implementation
    choose_plain_packing(model)
    prove_prefix_sharing(model)
    TransformersEngine(model)
    assert model.training
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_was_changed_since_its_class_was_written_is_tried_itself() -> None:
    class Shifted(nn.Module):
        """What a layer gave a token before is added to the next."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: Tensor) -> Tensor:
            found: Tensor = self.inner(states)
            return found + found.roll(1, 1)

    model = qwen3().eval()
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    with pytest.raises(NotProven, match="its states are off by"):
        prove_prefix_sharing(model)


def mask_of(seen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    at = torch.arange(12)
    return seen(at[:, None], at)[None, None]


@pytest.mark.parametrize(
    ("mask", "window", "other"),
    [
        (None, None, False),
        (mask_of(lambda q, k: k <= q), None, False),
        (mask_of(lambda q, k: k <= q), 12, False),
        (mask_of(lambda q, k: (k <= q) & (k > q - 4)), 4, False),
        (mask_of(lambda q, k: (k <= q) & (k > q - 4)), None, True),
        (mask_of(lambda q, k: (k <= q) & (k > q - 4)), 5, True),
        (mask_of(lambda q, k: (k <= q) & (k // 4 == q // 4)), None, True),
        (mask_of(lambda q, k: (k <= q) | (k < 3)), None, True),
        (mask_of(lambda q, k: k <= q).float().log(), None, False),
    ],
)
def test_masks_are_compared_with_the_window_that_attention_gets(
    mask: Tensor | None, window: int | None, other: bool
) -> None:
    assert AttentionCall("Attention", mask, window).has_other_mask() == other


def test_a_vocabulary_of_few_words_will_do() -> None:
    assert max(max(row) for row in find_proof(qwen3()).rows) < VOCABULARY
