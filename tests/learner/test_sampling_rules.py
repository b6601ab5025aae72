"""The learner's distribution is the one that was sampled from: over the same set, after the same penalty."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import anyio
import pytest
import torch

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.learner import logprobs
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.logprobs import token_logprobs
from agentrl.learner.packing import MicroBatch
from agentrl.learner.sampling_rules import SamplingRules
from agentrl.models.kept_tokens import decode_kept, encode_kept
from agentrl.models.policy import load_policy
from agentrl.renderer.template import TemplateRenderer
from agentrl.types import KeptTokens, Sample, SamplingParams
from tests.helpers.tiny import qwen3

TRUNCATED = SamplingParams(top_p=0.9, min_p=0.05)
SAMPLINGS = [
    TRUNCATED,
    SamplingParams(temperature=1.5, top_k=5, top_p=0.95),
    SamplingParams(temperature=4.0, min_p=0.001),  # many tokens are kept: bits
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.2, repetition_penalty=0.8, top_p=0.8),
]


def sampled_rows(model: Any, params: SamplingParams, prompt: list[int], turns: int = 2) -> list[Sample]:
    """Episodes of one prompt, each of several turns with tokens of the environment between them."""
    engine = TransformersEngine(model)
    rows: list[Sample] = []

    async def play(number: int) -> None:
        row = Sample(list(prompt), [0] * len(prompt), [0.0] * len(prompt), [], [None] * len(prompt))
        for turn in range(turns):
            how = replace(params, seed=10 * number + turn, max_tokens=12)
            done = await engine.generate(row.token_ids, how, session=str(number))
            assert (done.kept is None) == (not params.truncates)
            sets = done.kept.sets() if done.kept else [None] * 12
            more = [*done.token_ids, 5, 6]
            kept = [*row.kept, *sets, None, None]
            probabilities = [*row.logprobs, *done.logprobs, 0.0, 0.0]
            row = Sample([*row.token_ids, *more], [*row.loss_mask, *[1] * 12, 0, 0], probabilities, [], kept)
        rows.append(replace(row, advantages=[1.0 - 2 * (number % 2)] * len(row.token_ids)))

    async def play_all() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(play, number)

    anyio.run(play_all)
    return rows


def own_logprobs(row: Sample) -> torch.Tensor:
    return torch.tensor([p for p, mask in zip(row.logprobs, row.loss_mask, strict=True) if mask])


def learn(model: Any, rows: list[Sample], params: SamplingParams, **more: Any) -> Learner:
    settings = LossSettings(temperature=params.temperature, repetition_penalty=params.repetition_penalty, **more)
    learner = Learner(model, [torch.optim.SGD(model.parameters(), lr=more.pop("lr", 0.0))], settings)
    learner.metrics = learner.update(rows)  # type: ignore[attr-defined]
    return learner


@pytest.mark.parametrize("packing", ["padded", "prefix"])
@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_its_logprobs_are_the_engine_s(params: SamplingParams, packing: str) -> None:
    model = qwen3()
    rows = sampled_rows(model, params, list(range(7, 30)))
    learner = learn(model, rows, params, packing=packing, max_tokens_per_microbatch=90)
    for old, row in zip(learner.old_logprobs, rows, strict=True):
        assert old is not None
        assert float((old - own_logprobs(row)).abs().max()) < 1e-5


def test_on_nano_and_its_own_task_they_agree_to_a_hundred_thousandth() -> None:
    policy = load_policy("nano")
    prompt = TemplateRenderer(policy.tokenizer).render_ids([{"role": "user", "content": "What is 12 + 30 * 4?"}])
    rows = sampled_rows(policy.model, TRUNCATED, prompt, turns=1)
    learner = learn(policy.model, rows, TRUNCATED)
    for old, row in zip(learner.old_logprobs, rows, strict=True):
        assert old is not None
        assert float((old - own_logprobs(row)).abs().max()) < 1e-5


def test_the_sets_are_held_while_the_policy_moves() -> None:
    """After a large step the tokens would partly be outside of the policy's own sets; they keep a finite logprob."""
    model = qwen3()
    rows = sampled_rows(model, SamplingParams(top_k=2), list(range(7, 30)))
    settings = LossSettings(num_iterations=3, max_grad_norm=100.0)
    learner = Learner(model, [torch.optim.SGD(model.parameters(), lr=0.5)], settings)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    metrics = learner.update(rows)
    assert learner.version == 3
    assert metrics["loss"] == metrics["loss"]
    assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())
    row = rows[0]
    ids = torch.tensor([row.token_ids])
    position = len(row.token_ids) - 3
    logits = model(input_ids=ids).logits[0, position - 1]
    (kept,) = decode_kept([row.kept[position]], len(logits), torch.device("cpu"))
    inside = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[row.token_ids[position]]
    after = learn(model, rows, SamplingParams(top_k=2)).old_logprobs[0]
    assert after is not None
    torch.testing.assert_close(after[-1], inside.detach())


def test_gradients_are_those_of_the_restricted_distribution() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 40, dtype=torch.float64)
    states = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 40, (9,))
    kept = torch.rand(9, 40) < 0.3
    kept[torch.arange(9), targets] = True
    sets = KeptTokens.collect(encode_kept(kept)).sets()
    row = Sample([3, *targets.tolist()], [0] + [1] * 9, [0.0] * 10, [1.0] * 10, [None, *sets])
    rules = SamplingRules(MicroBatch.read([row]), 1.4)

    def compute(states: torch.Tensor) -> torch.Tensor:
        found, entropy = token_logprobs(lambda s: head(s), states, targets, 0.8, rules=rules, entropy_gradient=True)
        return found.sum() + entropy.sum()

    def plain(states: torch.Tensor) -> torch.Tensor:
        total = states.new_zeros(())
        for at, state in enumerate(states):
            logits = head(state)
            seen = sorted(set(row.token_ids[: at + 1]))
            changed = [z * 1.4 if z < 0 else z / 1.4 for z in logits[seen]]
            logits = logits.index_put((torch.tensor(seen),), torch.stack(changed)) / 0.8
            inside = logits[kept[at]].log_softmax(-1)
            total = total + inside[int(kept[at][: targets[at]].sum())] - (inside.exp() * inside).sum()
        return total

    for name, function in (("found", compute), ("expected", plain)):
        (gradient,) = torch.autograd.grad(function(states), states)
        value = function(states).detach()
        if name == "found":
            found = value, gradient
    torch.testing.assert_close(found[0], value, rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(found[1], gradient, rtol=1e-4, atol=1e-5)


def test_in_chunks_they_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SAMPLINGS[-1]
    rows = sampled_rows(qwen3(), params, list(range(7, 30)))
    found = []
    for budget in (1 << 29, 5 * 4 * 60):
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", budget)
        model = qwen3()
        learner = learn(model, rows, params, entropy_coef=0.01, beta=0.1)
        found.append([t for t in learner.learned if t is not None])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts)


@cache
def _truncated_rows() -> list[Sample]:
    return sampled_rows(qwen3(), TRUNCATED, list(range(7, 30)))


def test_the_reference_and_the_entropy_are_over_the_same_sets() -> None:
    """A reference equal to the policy has no distance from it, though both leave tokens out."""
    learner = learn(qwen3(), _truncated_rows(), TRUNCATED, beta=0.1)
    metrics = learner.metrics  # type: ignore[attr-defined]
    assert abs(metrics["kl"]) < 1e-6
    whole = learn(qwen3(), [replace(row, kept=()) for row in _truncated_rows()], TRUNCATED, beta=0.1)
    assert 0 < metrics["entropy"] < whole.metrics["entropy"]  # type: ignore[attr-defined]
    assert abs(metrics["sampling/importance_sampling_ratio/mean"] - 1) < 1e-5


def test_rows_that_share_tokens_have_sets_of_their_own() -> None:
    """Two rows with the same tokens, drawn among different sets: each token has its own row's logprob."""
    model = qwen3()
    row = _truncated_rows()[0]
    free = replace(row, kept=())
    both = learn(model, [row, free], TRUNCATED, packing="prefix").old_logprobs
    alone = [learn(model, [r], TRUNCATED).old_logprobs[0] for r in (row, free)]
    for mine, expected in zip(both, alone, strict=True):
        torch.testing.assert_close(mine, expected)
    assert both[0] is not None
    assert both[1] is not None
    assert bool((both[0] >= both[1] - 1e-6).all())
    assert float((both[0] - both[1]).max()) > 0.01
