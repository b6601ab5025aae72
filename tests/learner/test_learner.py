"""One optimizer step: what gets a gradient, what does not, and that packing changes nothing."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.settings.catalogue import list_own_entries
from agentrl.types import Sample

VOCABULARY = 48


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def rows(count: int = 8, seed: int = 0) -> list[Sample]:
    """Conversations of different lengths: prompt, model, world, model."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        mask = [0] * rng.randint(2, 9) + [1] * rng.randint(1, 9) + [0] * rng.randint(0, 9) + [1] * rng.randint(1, 9)
        ids = [rng.randrange(VOCABULARY) for _ in mask]
        found.append(Sample(ids, mask, [-3.8 * m for m in mask], [rng.uniform(-1, 1)] * len(mask)))
    return found


def alike(count: int = 4) -> list[Sample]:
    """Rows of one prompt."""
    prompt = [random.Random(9).randrange(VOCABULARY) for _ in range(40)]
    found = []
    for r in rows(count, seed=9):
        mask = [0] * 40 + r.loss_mask
        found.append(Sample(prompt + r.token_ids, mask, [-3.8 * m for m in mask], [r.advantages[0]] * len(mask)))
    return found


LOSSES = [name for name, _ in list_own_entries("loss")]
CORRECTIONS = [name for name, _ in list_own_entries("importance_sampling")]


def learner(model: Any, name: str = "adamw", lr: float = 1e-3, **settings: Any) -> Learner:
    policy = copy.deepcopy(model)
    settings = {"max_tokens_per_microbatch": 8192} | settings  # no pass to measure the model
    return Learner(policy, make_optimizers(policy, name, lr), LossSettings(threads=1, **settings))


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradient it was given, and changes nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = [None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]]


def gradients(model: Any, given_rows: Sequence[Sample], **settings: Any) -> tuple[list[Tensor], dict[str, float]]:
    policy = copy.deepcopy(model)
    recorder = Recorder(policy.parameters(), lr=1.0)
    found = Learner(policy, [recorder], LossSettings(threads=1, max_grad_norm=1e9, **settings)).update(given_rows)
    return [g for g in recorder.seen if g is not None], found


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss": loss} for loss in LOSSES),
        *({"loss": loss, "importance_level": "sequence"} for loss in LOSSES),
        *({"importance_sampling_mode": name} for name in CORRECTIONS),
        {"beta": 0.1},
        {"entropy_coef": 0.1},
        {"entropy_coef": 0.1, "top_entropy_quantile": 0.4},
        {"off_policy_threshold": 0.0},
        {"delta": 1.5},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_the_packing(model: Any, settings: dict[str, Any]) -> None:
    wanted, told = gradients(model, rows(), **settings, max_tokens_per_microbatch=8192)
    assert max(float(g.abs().max()) for g in wanted) > 1e-5
    for budget in (1, 100):
        found, also = gradients(model, rows(), **settings, max_tokens_per_microbatch=budget)
        assert also == pytest.approx(told, abs=1e-5, rel=1e-4)
        assert also["loss"] == pytest.approx(told["loss"], abs=1e-6)
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_gradient_is_that_of_the_formula(model: Any, loss: str) -> None:
    """The loss written again, plainly, with the model's own forward pass, a row at a time."""
    temperature, cap, given_rows = 0.7, 1.5, rows(4)
    policy = copy.deepcopy(model)
    tokens = sum(sum(r.loss_mask) for r in given_rows)
    total = torch.zeros(())
    for r in given_rows:
        logits = policy(torch.tensor([r.token_ids])).logits[0, :-1] / temperature
        logp = logits.log_softmax(-1).gather(1, torch.tensor(r.token_ids[1:])[:, None])[:, 0]
        mask = torch.tensor(r.loss_mask[1:], dtype=torch.float)
        rho = (logp.detach() - torch.tensor(r.logprobs[1:])).exp().clamp(max=cap)
        each = -(logp - logp.detach()).exp() * torch.tensor(r.advantages[1:]) * rho * mask
        total = total + (each.sum() / tokens if loss == "dapo" else each.sum() / mask.sum() / len(given_rows))
    total.backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad for p in policy.parameters()]
    found, told = gradients(model, given_rows, loss=loss, temperature=temperature, importance_sampling_max=cap)
    assert told["loss"] == pytest.approx(total.item(), abs=1e-6)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_tokens_that_others_wrote_teach_nothing(model: Any) -> None:
    wanted, told = gradients(model, rows())
    changed = [
        Sample(
            r.token_ids,
            r.loss_mask,
            [p if m else -99.0 for p, m in zip(r.logprobs, r.loss_mask, strict=True)],
            [a if m else 1e6 for a, m in zip(r.advantages, r.loss_mask, strict=True)],
        )
        for r in rows()
    ]
    found, also = gradients(model, changed)
    assert also == told
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_no_gradient_reaches_the_logits_of_tokens_that_others_wrote(model: Any) -> None:
    policy = copy.deepcopy(model)
    (row,) = rows(1)
    hidden: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    settings = LossSettings(threads=1, max_tokens_per_microbatch=8192)
    ours = Learner(policy, [Recorder(policy.parameters(), lr=1.0)], settings)
    policy.base_model.register_forward_hook(keep)
    ours.update([row])
    (state,) = hidden
    assert state.grad is not None
    touched = (state.grad[0].abs().sum(-1) > 0).tolist()
    assert touched == [bool(m) for m in row.loss_mask[1:]] + [False]  # the state before a token predicts it


def test_what_was_good_becomes_likelier_and_what_was_bad_less_likely(model: Any) -> None:
    good, bad = rows(2, seed=5)
    given_rows = [
        Sample(r.token_ids, r.loss_mask, r.logprobs, [a] * len(r.token_ids)) for r, a in ((good, 1.0), (bad, -1.0))
    ]

    def likelihood(policy: Any, r: Sample) -> float:
        with torch.no_grad():
            logp = policy(torch.tensor([r.token_ids])).logits[0, :-1].log_softmax(-1)
        chosen = logp.gather(1, torch.tensor(r.token_ids[1:])[:, None])[:, 0]
        return float((chosen * torch.tensor(r.loss_mask[1:])).sum())

    for name in ("adamw", "muon"):
        ours = learner(model, name)
        for _ in range(5):
            ours.update(given_rows)
        assert likelihood(ours.policy, good) > likelihood(model, good) + 0.1
        assert likelihood(ours.policy, bad) < likelihood(model, bad) - 0.1
        assert ours.version == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": "prefix"},
        {"packing": "padded"},
        {"num_iterations": 3, "temperature": 0.7},
        {"top_entropy_quantile": 0.4},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_old_logprobs_are_those_of_the_models_own_forward_pass(model: Any, settings: dict[str, Any]) -> None:
    given_rows = [*rows(), *alike(), rows()[0]]  # prefixes in common, and a row that is there twice
    ours = learner(model, lr=0.05, max_tokens_per_microbatch=64, **settings)
    ours.update(given_rows)
    temperature = settings.get("temperature", 1.0)
    assert len(ours.old_logprobs) == len(given_rows)
    for r, old in zip(given_rows, ours.old_logprobs, strict=True):
        assert old is not None
        with torch.no_grad():
            logp = (model(torch.tensor([r.token_ids])).logits[0, :-1] / temperature).log_softmax(-1)
        each = logp.gather(1, torch.tensor(r.token_ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(old, each[torch.tensor(r.loss_mask[1:]) > 0], atol=1e-5, rtol=1e-5)
    assert not any(old is None or old.requires_grad for old in ours.old_logprobs)
    ours.update([])
    assert ours.old_logprobs == []


def test_the_old_logprobs_cost_no_pass_of_their_own(model: Any) -> None:
    ours, passes = learner(model, packing="padded", num_iterations=2), []
    ours.policy.base_model.register_forward_hook(lambda *call: passes.append(1))
    ours.update(rows())
    assert len(passes) == 2
    assert len(ours.old_logprobs) == 8


def test_the_metrics_of_an_update(model: Any) -> None:
    told = learner(model).update(rows())
    assert told["trained_tokens"] == sum(sum(r.loss_mask) for r in rows())
    assert told["trained_rows"] == 8
    assert told["clip_ratio/region_mean"] == 0.0
    assert 0 < told["entropy"] < math.log(VOCABULARY) + 1e-6
    low, mean, high = (told[f"sampling/importance_sampling_ratio/{n}"] for n in ("min", "mean", "max"))
    assert 0 < low <= mean <= high <= 2.0
    assert 0 < told["sampling/sampling_logp_difference/mean"] <= told["sampling/sampling_logp_difference/max"]
    assert all(math.isfinite(v) for v in told.values())


def test_a_batch_may_be_learnt_from_more_than_once_and_then_the_ratio_is_clipped(model: Any) -> None:
    once, twice = learner(model, lr=0.02), learner(model, lr=0.02, num_iterations=3)
    assert once.update(rows())["clip_ratio/region_mean"] == 0.0
    assert twice.update(rows())["clip_ratio/region_mean"] > 0.1
    assert (once.version, twice.version) == (1, 3)
    wide = learner(model, lr=0.02, num_iterations=3, epsilon=0.999, epsilon_high=1e9)
    assert wide.update(rows())["clip_ratio/region_mean"] == 0.0
    assert not torch.equal(next(wide.policy.parameters()), next(twice.policy.parameters()))


def test_a_gradient_that_is_no_number_changes_nothing(model: Any) -> None:
    ours = learner(model)
    before = copy.deepcopy(ours.policy.state_dict())
    broken = rows(3)
    broken[1].advantages[:] = [math.nan] * len(broken[1].advantages)
    told = ours.update(broken)
    assert math.isnan(told["grad_norm"])
    assert ours.version == 0
    assert all(torch.equal(before[name], now) for name, now in ours.policy.state_dict().items())
    assert all(p.grad is None for p in ours.policy.parameters())
    assert math.isfinite(ours.update(rows())["grad_norm"])  # and the next step is as good as new
    fresh = learner(model)
    fresh.update(rows())
    assert all(torch.equal(a, b) for a, b in zip(fresh.policy.parameters(), ours.policy.parameters(), strict=True))


def test_nothing_to_learn_is_no_update(model: Any) -> None:
    ours = learner(model)
    nothing = [Sample(r.token_ids, r.loss_mask, r.logprobs, [0.0] * len(r.advantages)) for r in rows(3)]
    for given_rows in ([], [Sample([], [], [], [])], nothing):
        told = ours.update(given_rows)
        assert told["scored_rows"] == len(given_rows)
        assert (told["trained_rows"], told["forwarded_rows"]) == (0, 0)
        assert ours.old_logprobs == [None] * len(given_rows)
        assert "entropy" not in told
    assert ours.version == 0


def test_gradients_are_clipped(model: Any) -> None:
    policy = copy.deepcopy(model)
    recorder = Recorder(policy.parameters(), lr=1.0)
    told = Learner(policy, [recorder], LossSettings(threads=1, max_grad_norm=0.01)).update(rows())
    norm = torch.stack([g.norm() for g in recorder.seen if g is not None]).norm()
    assert told["grad_norm"] > 0.01
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_the_learning_rate_is_a_share_of_the_first(model: Any) -> None:
    policy = copy.deepcopy(model)
    optimizers = make_optimizers(policy, "muon", 0.5, weight_decay=0.1)
    ours = Learner(policy, optimizers, LossSettings())
    for share in (0.5, 0.1):
        ours.set_lr(share)
        assert {g["lr"] for o in optimizers for g in o.param_groups} == {0.5 * share}
    assert {g["weight_decay"] for o in optimizers for g in o.param_groups} == {0.1}


def test_muon_takes_the_hidden_matrices_and_every_parameter_has_one_optimizer(model: Any) -> None:
    policy = copy.deepcopy(model)
    muon, adamw = make_optimizers(policy, "muon", 1e-3)
    matrices = {id(p) for g in muon.param_groups for p in g["params"]}
    rest = {id(p) for g in adamw.param_groups for p in g["params"]}
    assert not matrices & rest
    assert matrices | rest == {id(p) for p in policy.parameters()}
    names = {n for n, p in policy.named_parameters() if id(p) in rest}
    assert "model.embed_tokens.weight" in names
    assert all("norm" in n or "embed" in n for n in names)


def test_the_reference_is_the_first_policy_until_it_is_synced(model: Any) -> None:
    for every, grows in ((None, True), (1, False)):
        trained = learner(model, lr=1e-2, beta=0.1, ref_sync_steps=every)
        kls = [trained.update(rows())["kl"] for _ in range(3)]
        assert kls[0] == pytest.approx(0.0, abs=1e-6)
        assert (kls[2] > 1e-4) == grows


def test_the_reference_follows_the_policy_by_its_share(model: Any) -> None:
    """As TRL's sync_ref_model: reference = alpha * policy + (1 - alpha) * reference, every so many updates."""
    trained = learner(model, lr=1e-2, beta=0.1, ref_sync_steps=2, ref_mixup_alpha=0.6)
    before = trained.copy_weights()
    trained.update(rows())
    for name, reference in (trained.train_state.reference or {}).items():
        assert torch.equal(reference, before[name])
    trained.update(rows())
    policy = trained.copy_weights()
    for name, reference in (trained.train_state.reference or {}).items():
        torch.testing.assert_close(reference, 0.4 * before[name] + 0.6 * policy[name])


def test_without_a_correction_the_engines_logprobs_say_nothing(model: Any) -> None:
    far = [Sample(r.token_ids, r.loss_mask, [p - 3.0 for p in r.logprobs], r.advantages) for r in rows()]
    losses = {
        mode: [learner(model, lr=1e-9, importance_sampling_mode=mode).update(own)["loss"] for own in (rows(), far)]
        for mode in ("none", "token_truncate")
    }
    assert losses["none"][0] == pytest.approx(losses["none"][1])
    assert losses["token_truncate"][0] != pytest.approx(losses["token_truncate"][1])


def test_without_a_kl_term_there_is_no_reference(model: Any) -> None:
    assert learner(model).train_state.reference is None
    assert "kl" not in learner(model).update(rows())


def test_an_entropy_bonus_makes_less_sure(model: Any) -> None:
    """With no advantage to speak of, only the bonus acts."""
    calm = [Sample(r.token_ids, r.loss_mask, r.logprobs, [1e-9] * len(r.advantages)) for r in rows()]
    found = {}
    for coef in (-1.0, 1.0):
        trained = learner(model, lr=1e-3, entropy_coef=coef)
        first = trained.update(calm)["entropy"]
        found[coef] = trained.update(calm)["entropy"] - first
    assert found[-1.0] < 0 < found[1.0] + 1e-3
    assert found[1.0] > found[-1.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_several_updates_on_one_batch(model: Any, loss: str) -> None:
    trained = learner(model, lr=1e-3, loss=loss, num_iterations=3)
    told = trained.update(rows())
    assert trained.version == 3
    assert all(math.isfinite(v) for v in told.values())


def valued(advantages: Sequence[float]) -> list[Sample]:
    """Rows of one length with these advantages."""
    return [
        Sample([*range(3, 9), *own], [0] * 6 + [1] * 4, [0.0] * 6 + [-3.8] * 4, [0.0] * 6 + [a] * 4)
        for a, own in zip(advantages, ([10 + i, 20 + i, 30 + i, 7] for i in range(99)), strict=False)
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_of_no_advantage_counts_in_the_denominator(model: Any, loss: str) -> None:
    """A member at the mean and one beside it weigh the same: the gradient does not jump where a row becomes flat."""
    exact, told = gradients(model, valued([1.0, -1.0, 0.0]), loss=loss)
    near, also = gradients(model, valued([1.0, -1.0, 1e-7]), loss=loss)
    assert (told["trained_rows"], told["forwarded_rows"], told["scored_rows"]) == (2, 2, 3)
    assert (told["trained_tokens"], told["scored_tokens"]) == (8, 12)
    assert also["trained_rows"] == 3
    assert told["grad_norm"] == pytest.approx(also["grad_norm"], rel=1e-4)
    for one, other in zip(exact, near, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_one_group_among_flat_ones_weighs_as_one_among_them(model: Any) -> None:
    alone = gradients(model, valued([1.0, -1.0]))[1]["grad_norm"]
    among = gradients(model, valued([1.0, -1.0] + [0.0] * 16))[1]["grad_norm"]
    assert among == pytest.approx(alone / 9, rel=1e-4)


def test_rows_of_no_advantage_cost_no_pass(model: Any) -> None:
    cases: list[tuple[dict[str, Any], int]] = [({}, 2), ({"beta": 0.1}, 12), ({"entropy_coef": 0.1}, 6)]
    for settings, rows_passed in cases:
        passed: list[int] = []
        ours = learner(model, packing="padded", **settings)
        ours.policy.base_model.register_forward_hook(
            lambda module, given, more, out, passed=passed: passed.append(len(more["input_ids"])), with_kwargs=True
        )
        told = ours.update(valued([1.0, -1.0, 0.0, 0.0, 0.0, 0.0]))
        assert sum(passed) == rows_passed
        assert told["forwarded_rows"] == (2 if not settings else 6)
        assert told["trained_rows"] == 2
        assert [old is not None for old in ours.old_logprobs] == [True] * 2 + [bool(settings)] * 4


def test_a_kl_term_holds_flat_rows_too(model: Any) -> None:
    """Solved and failed groups do not drift away from the reference unseen."""
    moved = copy.deepcopy(model)
    policy = copy.deepcopy(model)
    ours = Learner(policy, make_optimizers(policy, "adamw", 3e-3), LossSettings(threads=1, beta=1.0, max_grad_norm=1e9))
    with torch.no_grad():
        for n, p in moved.named_parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))))
        policy.load_state_dict(moved.state_dict())
    kls = [ours.update(valued([0.0] * 4))["kl"] for _ in range(12)]
    assert kls[-1] < 0.7 * kls[0]


def test_the_weights_may_be_given(model: Any) -> None:
    """As the ledger of a step has them."""
    given_rows = valued([1.0, -1.0])
    wanted, _ = gradients(model, given_rows)
    policy = copy.deepcopy(model)
    recorder = Recorder(policy.parameters(), lr=1.0)
    ours = Learner(policy, [recorder], LossSettings(threads=1, max_grad_norm=1e9))
    ours.update(given_rows, [0.5, 0.5])
    found = [g for g in recorder.seen if g is not None]
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one * 4, other, atol=1e-5, rtol=1e-4)


def test_dropout_stays_off_where_layers_compute_again() -> None:
    """OPT's layers ask for dropout themselves: in training mode, which checkpointing wants, they had it."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        dropout=0.5,
    )
    model = OPTForCausalLM(config).eval()
    gradients = []
    for checkpointing in (False, True):
        own = copy.deepcopy(model)
        settings = LossSettings(packing="padded", gradient_checkpointing=checkpointing, max_grad_norm=1e9)
        Learner(own, [torch.optim.SGD(own.parameters(), lr=1.0)], settings).update(rows())
        gradients.append(torch.cat([p.detach().flatten() for p in own.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_contexts_of_a_row_do_not_see_each_other(model: Any, packing: str) -> None:
    """Token by token a row of two contexts teaches what two rows do."""
    pairs = list(zip(alike(6)[::2], alike(6)[1::2], strict=True))
    joined = [
        Sample(
            a.token_ids + b.token_ids,
            a.loss_mask + b.loss_mask,
            a.logprobs + b.logprobs,
            [a.advantages[0]] * (len(a.token_ids) + len(b.token_ids)),
            starts=(0, len(a.token_ids)),
        )
        for a, b in pairs
    ]
    apart = [replace(s, advantages=[a.advantages[0]] * len(s.token_ids)) for a, b in pairs for s in (a, b)]
    wanted, told = gradients(model, apart, loss="dapo", packing=packing)
    found, also = gradients(model, joined, loss="dapo", packing=packing)
    assert also["loss"] == pytest.approx(told["loss"], abs=1e-6)
    assert (told["scored_rows"], also["scored_rows"]) == (6, 3)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def split_into_threads(row: Sample, count: int) -> Sample:
    """Split a row of 8 turns into so many contexts by hand: each begins as the row does, and trains its own turns."""
    ends = [
        i + 1 for i, m in enumerate(row.loss_mask) if m and (i + 1 == len(row.loss_mask) or not row.loss_mask[i + 1])
    ]
    bounds = [0, *ends[8 // count - 1 :: 8 // count]]
    ids, mask, starts = list[int](), list[int](), list[int]()
    for begin, end in pairwise(bounds):
        starts.append(len(ids))
        ids += row.token_ids[:end]
        mask += [0] * begin + row.loss_mask[begin:end]
    return Sample(ids, mask, [-3.8 * m for m in mask], [row.advantages[0]] * len(ids), starts=tuple(starts))


@pytest.mark.parametrize("packing", ["padded", "prefix"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"loss": loss} for loss in LOSSES),
        {"importance_level": "sequence"},
        *({"importance_sampling_mode": mode} for mode in CORRECTIONS if mode != "token_truncate"),
        {"off_policy_threshold": 0.1, "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
        {"num_iterations": 2, "importance_level": "sequence", "epsilon": 1e-6},
    ],
)
def test_an_episode_split_into_threads_teaches_what_one_row_does(
    model: Any, packing: str, settings: dict[str, Any]
) -> None:
    """Beside an episode of one turn, so that an episode of many threads would show if it weighed more."""
    rng = random.Random(4)
    mask = [0] * 20 + [m for n in range(8) for m in [1] * (2 + n % 3) + [0] * 3][:-3]
    whole = Sample([rng.randrange(VOCABULARY) for _ in mask], mask, [-3.8 * m for m in mask], [0.7] * len(mask))
    other = rows(1)[0]
    wanted, told = gradients(model, [whole, other], packing=packing, **settings)
    for count in (1, 2, 8):
        split = split_into_threads(whole, count)
        assert (len(split.starts), sum(split.loss_mask)) == (count, sum(mask))
        found, also = gradients(model, [split, other], packing=packing, **settings)
        assert also["loss"] == pytest.approx(told["loss"], abs=1e-6)
        assert also["scored_rows"] == told["scored_rows"]
        for one, its in zip(wanted, found, strict=True):
            torch.testing.assert_close(its, one, atol=1e-6, rtol=0)


def test_a_process_keeps_its_part_writer_until_the_run_ends(model: Any) -> None:
    class Asked(ProcessGroup):
        """A process after the first, which is told to forget, twice, and then that it is over."""

        messages: list[object]

        def receive(self) -> object:
            closed.append(writer.closed)
            return self.messages.pop(0)

    class Writer:
        closed = False

        def close(self) -> None:
            self.closed = True

    closed: list[bool] = []
    ours, writer = learner(model), Writer()
    ours.process_group, ours.part_writer = Asked(), writer  # type: ignore[assignment]
    ours.process_group.messages = ["reset", "reset", None]
    ours.run_worker()
    assert closed == [False, False, False]
    assert writer.closed
