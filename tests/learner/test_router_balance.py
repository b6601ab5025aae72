"""The balancing loss of a mixture of experts: transformers' own number, however rows are packed and cut."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.errors import UserError
from agentrl.learner import hidden_states
from agentrl.learner.hidden_states import PADDED, PREFIX
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.packing import MicroBatch
from agentrl.learner.prefix_tree.flex_attention import FlexLayout
from agentrl.learner.router_balance import find_router_balance
from agentrl.types import Sample
from tests.helpers.tiny import SHAPE, qwen3

MODELS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def make_rows(count: int = 5, shared: int = 24) -> list[Sample]:
    """Rows of one prompt, with different endings."""
    rng = random.Random(0)
    prompt = [rng.randrange(60) for _ in range(shared)]
    rows = []
    for _ in range(count):
        own = [rng.randrange(60) for _ in range(rng.randint(3, 17))]
        mask = [0] * shared + [1] * len(own)
        rows.append(Sample(prompt + own, mask, [-4.0 * m for m in mask], [rng.uniform(-1, 1)] * len(mask)))
    return rows


def compute_own(model: Any, rows: Sequence[Sample]) -> Tensor:
    """transformers' own loss of padded rows."""
    ids = [torch.tensor(r.token_ids) for r in rows]
    mask = pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
    outputs = model(pad_sequence(ids, batch_first=True), attention_mask=mask, output_router_logits=True)
    own: Tensor = outputs.aux_loss
    return own


def update(model: Any, rows: Sequence[Sample], **settings: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Make one step of plain descent; the metrics, and how far each parameter went."""
    own = copy.deepcopy(model)
    settings = {"max_grad_norm": 1e9, "threads": 1, **settings}
    learner = Learner(own, [torch.optim.SGD(own.parameters(), lr=1.0)], LossSettings(**settings))
    metrics = learner.update(rows)
    before = dict(model.named_parameters())
    return metrics, {n: before[n].detach() - p.detach() for n, p in own.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_it_is_transformers_own_however_rows_are_packed(name: str, packing: str) -> None:
    model, rows = build(name), make_rows()
    balance = find_router_balance(model, 0.1)
    assert balance is not None
    way, batch = (PREFIX if packing == "prefix" else PADDED), MicroBatch.read(rows)
    if packing == "prefix" and name == "gpt_oss":
        pytest.skip("attention with sinks has no forest")
    with way.context(model), balance.record(model) as logits:
        way.compute_states(model, batch)
    own = balance.compute(logits, batch, shares_prefixes=packing == "prefix")
    torch.testing.assert_close(own, compute_own(model, rows), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_a_forest_padded_to_whole_blocks_counts_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = build("qwen3_moe"), make_rows()
    balance, batch = find_router_balance(model, 0.1), MicroBatch.read(rows)
    assert balance is not None
    monkeypatch.setattr(hidden_states, "build_layout", FlexLayout)
    with PREFIX.context(model), balance.record(model) as logits:
        PREFIX.compute_states(model, batch)
    assert len(logits[0]) % 128 == 0
    own = balance.compute(logits, batch, shares_prefixes=True)
    torch.testing.assert_close(own, compute_own(model, rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packing", ["padded", "prefix"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_goes_where_trl_s_loss_goes(packing: str, checkpointing: bool) -> None:
    """TRL adds coefficient x aux_loss of the batch to the policy's loss: with no advantage only that is left."""
    model = build("qwen3_moe")
    rows = [Sample(r.token_ids, r.loss_mask, r.logprobs, [0.0] * len(r.advantages)) for r in make_rows()]
    (0.5 * compute_own(model, rows)).backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    metrics, moved = update(
        model, rows, packing=packing, router_aux_loss_coef=0.5, gradient_checkpointing=checkpointing
    )
    assert metrics["aux_loss"] == pytest.approx(float(compute_own(model, rows).detach()), rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(moved[name], gradient, atol=1e-5, rtol=1e-3)


def test_micro_batches_count_by_their_tokens() -> None:
    model, rows = build("qwen3_moe"), make_rows()
    longest = max(len(r.token_ids) for r in rows)
    metrics, _ = update(model, rows, packing="padded", router_aux_loss_coef=0.5, max_tokens_per_microbatch=longest)
    tokens = [len(r.token_ids) for r in rows]
    mean = sum(n * float(compute_own(model, [r]).detach()) for n, r in zip(tokens, rows, strict=True)) / sum(tokens)
    assert metrics["aux_loss"] == pytest.approx(mean, rel=1e-4)


def test_the_coefficient_is_the_model_s_own_by_default_and_0_is_none() -> None:
    model = build("qwen3_moe")
    found = find_router_balance(model, None)
    assert found is not None
    assert found.coef == model.config.router_aux_loss_coef > 0
    assert find_router_balance(model, 0.0) is None
    assert find_router_balance(qwen3(), None) is None
    with pytest.raises(UserError, match=r"router_aux_loss_coef 0\.1: Qwen3ForCausalLM is no mixture of experts"):
        find_router_balance(qwen3(), 0.1)
    metrics, _ = update(model, make_rows(), router_aux_loss_coef=0.0)
    assert "aux_loss" not in metrics


def test_where_rows_go_alone_the_config_s_coefficient_is_left_out_and_the_warning_says_so() -> None:
    class Scaled(MixtralForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + out.logits.roll(1, -1)
            return out

    model = build("mixtral")
    model.__class__ = Scaled
    coef = f"{model.config.router_aux_loss_coef:g}"
    told = rf"each row goes through it alone: .*; its config's router_aux_loss_coef {coef} is left out"
    with pytest.warns(UserWarning, match=told):
        assert Learner(model, [], LossSettings())._balance is None
    with pytest.warns(UserWarning, match="trained the plain way") as warned:
        Learner(model, [], LossSettings(router_aux_loss_coef=0.0))
    assert "router_aux" not in str(warned[0].message)
    with pytest.raises(UserError, match=r"router_aux_loss_coef 0\.1: not where a model is trained the plain way"):
        Learner(model, [], LossSettings(router_aux_loss_coef=0.1))
