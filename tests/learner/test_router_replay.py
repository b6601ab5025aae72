"""Router replay: a pass with experts that were chosen elsewhere is what a forward written by hand makes of them."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, OlmoeConfig, OlmoeForCausalLM

from agentrl.errors import UserError
from agentrl.learner import hidden_states
from agentrl.learner.hidden_states import PREFIX
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.losses.objective import LossMetrics
from agentrl.learner.packing import MicroBatch, pack_by_prefix
from agentrl.learner.prefix_tree.attention import build_layout
from agentrl.learner.prefix_tree.flex_attention import FlexLayout
from agentrl.learner.router_replay import RouterReplay
from agentrl.learner.row_arrays import RowArrays
from agentrl.types import RoutedExperts, Sample
from tests.helpers.tiny import SHAPE, qwen3
from tests.learner import test_router_balance
from tests.learner.test_router_balance import update

LAYERS, EXPERTS, TOP_K = 3, 4, 2
_PLAIN = {k: v for k, v in SHAPE.items() if k != "head_dim"}
MODELS: dict[str, Callable[[], Any]] = {
    **test_router_balance.MODELS,
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**_PLAIN, num_experts=4, num_experts_per_tok=2)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_PLAIN | {"num_key_value_heads": 4, "num_hidden_layers": 4},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
            **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8},
            **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        )
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def draw_experts(rng: random.Random, tokens: int) -> RoutedExperts:
    """Experts that no router chose."""
    drawn = [rng.sample(range(EXPERTS), TOP_K) for _ in range(tokens * LAYERS)]
    return RoutedExperts(array("B", [e for one in drawn for e in one]), LAYERS, TOP_K)


def make_rows(count: int = 5, shared: int = 40, *, forced: bool = True) -> list[Sample]:
    """Rows of one prompt that was routed once, with different endings; one of two contexts, one without experts."""
    rng = random.Random(0)
    prompt, its = [rng.randrange(60) for _ in range(shared)], draw_experts(rng, shared)
    rows = []
    for number in range(count):
        own = [rng.randrange(60) for _ in range(rng.randint(3, 17))]
        mask = [0] * shared + [1] * len(own)
        advantages = [rng.uniform(-1, 1)] * len(mask)
        row = Sample(prompt + own, mask, [-4.0 * m for m in mask], advantages)
        if forced and number != 3:  # its last token was not routed
            row = replace(row, routed_experts=[(0, its), (shared, draw_experts(rng, len(own) - 1))])
        rows.append(row)
    if forced:  # a second context, whose first tokens nobody says
        other = [rng.randrange(60) for _ in range(12)]
        one, length = rows[0], len(rows[0].token_ids)
        rows[0] = replace(
            one,
            token_ids=one.token_ids + other,
            loss_mask=one.loss_mask + [0] * 6 + [1] * 6,
            logprobs=one.logprobs + [0.0] * 6 + [-4.0] * 6,
            advantages=one.advantages + [one.advantages[0]] * 12,
            starts=(0, length),
            routed_experts=[*one.routed_experts, (length + 5, draw_experts(rng, 6))],
        )
    return rows


class HandRouter(nn.Module):
    """A router written out for one row, a token at a time: given experts, or those of the largest scores."""

    def __init__(self, router: Any, name: str, place: int, given: dict[int, list[list[int]]]) -> None:
        super().__init__()
        self.router, self.name, self.place, self.given = router, name, place, given

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = linear(hidden, self.router.weight, getattr(self.router, "bias", None))
        weights, chosen = zip(*(self._choose(i, row) for i, row in enumerate(logits)), strict=True)
        return logits, torch.stack(weights), torch.tensor(chosen)

    def _choose(self, token: int, logits: Tensor) -> tuple[Tensor, list[int]]:
        ranked = logits.tolist()
        if self.name == "deepseek_v3":  # two groups of two, of which the one with the larger sum is open
            scores = logits.sigmoid()
            group = int(scores[2:].sum() > scores[:2].sum())
            ranked = [s if i // 2 == group else -1.0 for i, s in enumerate(scores.tolist())]
        own = sorted(range(EXPERTS), key=lambda expert: -ranked[expert])[:TOP_K]
        chosen = self.given[token][self.place] if token in self.given else own
        if self.name == "gpt_oss":
            return logits[chosen].softmax(-1), chosen
        if self.name == "deepseek_v3":
            taken = logits.sigmoid()[chosen]
            return taken / taken.sum() * self.router.routed_scaling_factor, chosen
        probabilities = logits.softmax(-1)[chosen]
        normed = self.name == "mixtral" or self.router.norm_topk_prob
        return probabilities / probabilities.sum() if normed else probabilities, chosen


def score_by_hand(model: Any, name: str, row: Sample) -> Tensor:
    """The logprobs of a row's trained tokens: each context through a model whose routers are written by hand."""
    places = [n for n, _ in model.named_modules() if n.endswith((".gate", ".router"))]
    known = {}
    for first, routed in row.routed_experts:
        for token in range(len(routed)):
            flat = routed.take(token, token + 1).experts.tolist()
            known[first + token] = [flat[2 * layer : 2 * layer + 2] for layer in range(LAYERS)]
    scores = []
    for a, b in pairwise([*row.starts, len(row.token_ids)]):
        twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # other modules, the same parameters
        given = {token - a: experts for token, experts in known.items() if a <= token < b}
        for place, module in enumerate(places):
            twin.set_submodule(module, HandRouter(twin.get_submodule(module), name, place, given))
        ids = torch.tensor(row.token_ids[a:b])
        logprobs = twin(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        trained = [i for i in range(1, b - a) if row.loss_mask[a + i]]
        scores.append(torch.stack([logprobs[i - 1, ids[i]] for i in trained]))
    return torch.cat(scores)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_logprobs_are_those_of_routers_written_by_hand(name: str, packing: str) -> None:
    """Whatever a family makes of its scores: sums of 1, sigmoids, groups, a softmax over the chosen ones."""
    if name == "gpt_oss" and packing == "prefix":
        pytest.skip("attention with sinks has no forest")
    model, rows = build(name), make_rows()
    settings = LossSettings(packing=packing, threads=1, router_replay=True, router_aux_loss_coef=0.0)
    learner = Learner(copy.deepcopy(model), [torch.optim.SGD(model.parameters(), lr=0.0)], settings)
    learner.update(rows)
    assert (learner.packing.chosen or learner.packing.plain).name == packing
    by_hand = [score_by_hand(model, name, row).detach() for row in rows]
    for values, own in zip(learner.old_logprobs, by_hand, strict=True):
        torch.testing.assert_close(values, own, atol=2e-5, rtol=1e-5)
    plain = Learner(copy.deepcopy(model), [], replace(settings, router_replay=False))
    plain.update(rows)
    others = [float((v - o).abs().max()) for v, o in zip(plain.old_logprobs, by_hand, strict=True) if v is not None]
    assert max(others) > 0.05  # without it they would be other ones
    assert others[3] < 2e-5  # but for the row without experts


def read_own_experts(model: Any, rows: Sequence[Sample]) -> list[Sample]:
    """The rows with the experts that the model's own routers choose, as transformers tells their logits."""
    with_experts = []
    for row in rows:
        output = model(input_ids=torch.tensor([row.token_ids]), output_router_logits=True, use_cache=False)
        chosen = torch.stack([layer.topk(TOP_K, -1).indices for layer in output.router_logits], 1)  # tokens first
        routed = RoutedExperts(array("B", chosen[:-1].flatten().tolist()), LAYERS, TOP_K)
        with_experts.append(replace(row, routed_experts=[(0, routed)]))
    return with_experts


@pytest.mark.parametrize("packing", ["padded", "prefix"])
@pytest.mark.parametrize("more", [{}, {"router_aux_loss_coef": 0.5}, {"top_entropy_quantile": 0.5}, {"beta": 0.1}])
def test_the_policy_s_own_experts_change_nothing(packing: str, more: dict[str, Any]) -> None:
    model = build("qwen3_moe")
    rows = make_rows(forced=False)
    own = read_own_experts(model, rows)
    settings: dict[str, Any] = {"packing": packing, "router_aux_loss_coef": 0.0, **more}
    plain, its = update(model, rows, **settings)
    replayed, moved = update(model, own, router_replay=True, **settings)
    assert replayed.pop("router/replay_disagreement") == 0.0
    tokens = sum(len(row.token_ids) for row in rows)
    assert replayed.pop("router/replayed") == pytest.approx(1 - len(rows) / tokens)
    assert replayed == pytest.approx(plain, abs=1e-6)
    for name, gradient in its.items():
        torch.testing.assert_close(moved[name], gradient, atol=1e-6, rtol=1e-5)


def test_a_share_of_disagreement_is_of_rows_tokens_and_layers() -> None:
    """One expert of one layer is another one, in a token that all rows share: it counts for each row, packed or not."""
    model, rows = build("qwen3_moe"), make_rows(forced=False)
    changed = []
    for row in read_own_experts(model, rows):
        ((place, routed),) = row.routed_experts
        experts = routed.experts[:]
        at = 7 * LAYERS * TOP_K + TOP_K  # the second layer of the eighth token
        experts[at] = next(e for e in range(EXPERTS) if e not in experts[at : at + TOP_K])
        changed.append(replace(row, routed_experts=[(place, RoutedExperts(experts, LAYERS, TOP_K))]))
    known = sum(len(row.token_ids) - 1 for row in rows)
    for packing in ("padded", "prefix"):
        metrics, _ = update(model, changed, router_replay=True, packing=packing)
        # behind it, layers above may choose otherwise too: at least the one, and hardly more
        least = len(rows) / (known * LAYERS)
        assert least <= metrics["router/replay_disagreement"] * (1 + 1e-6)
        assert metrics["router/replay_disagreement"] < 0.2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_gradients_are_those_of_routers_written_by_hand_and_the_gate_has_one(packing: str, checkpointing: bool) -> None:
    model, rows = build("qwen3_moe"), make_rows()
    settings: dict[str, Any] = {"packing": packing, "router_replay": True, "router_aux_loss_coef": 0.0, "loss": "bnpo"}
    settings |= {"importance_sampling_mode": "none", "gradient_checkpointing": checkpointing}
    _, moved = update(model, rows, **settings)
    twin = copy.deepcopy(model)
    losses, tokens = [], sum(sum(row.loss_mask) for row in rows)
    for row in rows:
        scores = score_by_hand(twin, "qwen3_moe", row)
        losses.append(-(row.advantages[-1] * (scores - scores.detach()).exp()).sum() / tokens)
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    gates = 0
    for name, parameter in twin.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(moved[name], expected, atol=2e-6, rtol=1e-3)
        gates += name.endswith("gate.weight") and float(moved[name].abs().max()) > 1e-4
    assert gates == LAYERS


@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_an_adapter_learns_by_them_too(packing: str) -> None:
    torch.manual_seed(1)
    policy = get_peft_model(build("qwen3_moe"), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    rows = make_rows()
    settings = LossSettings(packing=packing, threads=1, router_replay=True, router_aux_loss_coef=0.0)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
    learner = Learner(policy, [optimizer], settings)
    learner.update(rows)
    for values, row in zip(learner.old_logprobs, rows, strict=True):
        torch.testing.assert_close(values, score_by_hand(policy, "qwen3_moe", row).detach(), atol=2e-5, rtol=1e-5)


def test_tokens_are_shared_only_where_they_go_to_the_same_experts() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(60) for _ in range(60)]
    its = draw_experts(rng, 59)
    other = RoutedExperts(its.experts[:], LAYERS, TOP_K)
    other.experts[45 * LAYERS * TOP_K] ^= 1  # in the 46th token alone
    one = Sample(ids, [0] * 50 + [1] * 10, [0.0] * 60, [1.0] * 60, routed_experts=[(0, its)])
    rows = [RowArrays.read(row) for row in (one, one, replace(one, routed_experts=[(0, other)]))]
    assert len(MicroBatch(rows[:2], [1.0, 1.0]).forest.token_ids) == 60
    assert len(MicroBatch(rows[1:], [1.0, 1.0]).forest.token_ids) == 60 + 15
    turned = RoutedExperts(its.experts[::-1], LAYERS, TOP_K)
    for token in range(59):  # the same sets, each in another order
        for layer in range(LAYERS):
            at = (token * LAYERS + layer) * TOP_K
            turned.experts[at : at + TOP_K] = its.experts[at : at + TOP_K][::-1]
    assert turned != its
    alike = [rows[0], RowArrays.read(replace(one, routed_experts=[(0, turned)]))]
    assert len(MicroBatch(alike, [1.0, 1.0]).forest.token_ids) == 60
    unsaid = RowArrays.read(replace(one, routed_experts=[]))
    assert len(MicroBatch([rows[0], unsaid], [1.0, 1.0]).forest.token_ids) == 120
    (batch,) = pack_by_prefix([*rows, unsaid], [1.0] * 4, 1000)
    assert len(batch.forest.token_ids) == 45 + 3 * 15 + 60  # the last 15 of two are too few to be shared
    assert sorted(map(len, batch.forest.token_index)) == [60] * 4
    for row, places in zip(batch.rows, batch.forest.token_index, strict=True):
        assert batch.forest.token_ids[places].tolist() == row.token_ids.tolist()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_a_forest_padded_to_whole_blocks_replays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what stands behind the last token takes the learner's own choice, and is counted nowhere."""
    model, batch = build("qwen3_moe"), MicroBatch.read(make_rows())
    replay, states, shares = RouterReplay.find(model), [], []
    for layout in (build_layout, FlexLayout):
        monkeypatch.setattr(hidden_states, "build_layout", layout)
        metrics = LossMetrics()
        with PREFIX.context(model), replay.replay(model, batch, shares_prefixes=True) as replayed:
            states.append(PREFIX.compute_states(model, batch))
        replayed.record(metrics)
        shares.append(metrics.values())
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    assert shares[0] == pytest.approx(shares[1], abs=0.01)
    assert 0.5 < shares[0]["router/replay_disagreement"] < 1.0


def test_several_iterations_and_optimizer_steps_replay_the_same() -> None:
    """At a learning rate of 0 nothing moves: the second pass has a ratio of 1 only if it goes to the same experts."""
    model, rows = build("qwen3_moe"), make_rows()
    settings = LossSettings(num_iterations=2, threads=1, router_replay=True, max_tokens_per_microbatch=80)
    learner = Learner(model, [torch.optim.SGD(model.parameters(), lr=0.0)], settings)
    learner.update(rows, updates=[0, 1, 0, 1, 0])
    for values, row in zip(learner.old_logprobs, rows, strict=True):
        torch.testing.assert_close(values, score_by_hand(model, "qwen3_moe", row).detach(), atol=2e-5, rtol=1e-5)


def test_the_modules_are_as_before_behind_an_update_and_behind_an_error() -> None:
    model, rows = build("mixtral"), make_rows()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    replay = RouterReplay.find(model)
    gate = model.get_submodule(replay.routers.names[0])

    def fail() -> None:
        with replay.replay(model, MicroBatch.read(rows), shares_prefixes=False):
            assert "forward" in vars(gate)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()


def test_what_cannot_be_replayed_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"router_replay: the experts of Qwen3ForCausalLM .* it is no mixture of exp"):
        Learner(qwen3(), [], LossSettings(router_replay=True))
    model, (row, *_) = build("qwen3_moe"), make_rows()
    learner = Learner(model, [torch.optim.SGD(model.parameters(), lr=0.0)], LossSettings(router_replay=True, threads=1))
    fewer = RoutedExperts(array("B", [0, 1] * 2 * 30), 2, 2)
    with pytest.raises(UserError, match=r"says 2 experts of a token in 2 layers, .* the policy's 3 routers choose 2"):
        learner.update([replace(row, routed_experts=[(0, fewer)])])
    beyond = RoutedExperts(array("H", [0, 300] * LAYERS * 30), LAYERS, 2)
    with pytest.raises(UserError, match=r"numbers up to 300; the policy's 3 routers choose 2 of 4"):
        learner.update([replace(row, routed_experts=[(0, beyond)])])
    with pytest.raises(ValueError, match=r"experts of tokens 60 to 90 in a row of"):
        learner.update([replace(row, routed_experts=[(60, RoutedExperts(array("B", [0, 1] * 90), LAYERS, 2))])])


def test_a_router_that_chooses_otherwise_than_its_kind_is_refused_at_its_first_pass() -> None:
    model, rows = build("mixtral"), make_rows()
    learner = Learner(model, [torch.optim.SGD(model.parameters(), lr=0.0)], LossSettings(router_replay=True, threads=1))
    gate = model.model.layers[1].mlp.gate

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        order = logits.argsort(-1, descending=True)[:, :TOP_K]
        return logits, logits.softmax(-1).gather(-1, order), order

    gate.forward = forward
    with pytest.raises(UserError, match=r"MixtralForCausalLM: its router model\.layers\.1\.mlp\.gate chose .* 0 times"):
        learner.update(rows)
