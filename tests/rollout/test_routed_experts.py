"""The experts of an episode's tokens, whichever way its contexts come to be, and what a learner makes of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl import Env, EnvSpec, Reply, Step
from agentrl.credit import assign_credit
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.learner.learner import Learner, LossSettings
from agentrl.rollout.episode import Branching, EpisodeContext, EpisodeLimits
from agentrl.rollout.folding import Folding, fold
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.threads.forest import ThreadForest
from agentrl.testing import ByteRenderer
from agentrl.types import Completion, Group, Observation, SamplingParams, Segment, Trajectory, count_routed
from tests.helpers.tiny import SHAPE
from tests.learner.test_router_replay import LAYERS, TOP_K, draw_experts

SAMPLING = SamplingParams(routed_experts_start=0)
LIMITS = EpisodeLimits(max_turns=4, max_tokens=7)


def build_model(seed: int = 0) -> Any:
    """Every byte is a token of it."""
    torch.manual_seed(seed)
    shape = SHAPE | {"vocab_size": 261, "max_position_embeddings": 1024}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ).eval()


class Talkative(TransformersEngine):
    """Its turns end where they have no more tokens, as if it had wanted to."""

    asked: list[int]

    async def generate(self, token_ids: Any, params: SamplingParams, *, session: str) -> Completion:
        done = await super().generate(token_ids, params, session=session)
        assert params.routed_experts_start is not None
        self.asked.append(params.routed_experts_start)
        return replace(done, stop_reason="stop")


class Chat(Env):
    """Says a number after each turn; worth what it drew."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.turns = 0
        return f"talk about {seed}, " * 4, {}

    async def step(self, action: Reply) -> Step:
        self.turns += 1
        return Step(f"at {self.turns}", 0.0, self.turns == 4, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"drawn": float(sum(trajectory.token_ids) % 7)}

    def clone(self) -> Env:
        other = type(self)()
        other.turns = self.turns
        return other


async def play(engine: Talkative, size: int = 4, **more: Any) -> Group:
    engine.asked = []
    rollout = Rollout(EnvSpec(Chat), engine, ByteRenderer(), LIMITS, SAMPLING)
    for name, value in more.items():
        setattr(rollout, name, value)
    return await rollout.group(0, size)


@torch.no_grad()
def assert_told(model: Any, episode: Trajectory) -> int:
    """Each token is told of but the last one of each context, as the model's own pass chooses; return the contexts."""
    told = {}
    for place, routed in episode.routed_experts:
        for number in range(len(routed)):
            assert place + number not in told  # each once
            told[place + number] = sorted_experts(np.array(routed.take(number, number + 1).experts))
    begin, contexts = 0, 0
    for context in episode.contexts:
        ids = [token for segment in context for token in segment.token_ids]
        ends = [i for i, s in enumerate(context) if s.author == "model"]
        trained = sum(len(s.token_ids) for s in context[: ends[-1] + 1])
        chosen = choose_experts(model, ids)
        for place in range(trained - 1):
            assert np.array_equal(told.pop(begin + place), chosen[place]), place
        begin += len(ids)
        contexts += 1
    assert told == {}
    return contexts


def sorted_experts(experts: Any) -> Any:
    return np.sort(experts.reshape(LAYERS, TOP_K), -1)


def choose_experts(model: Any, ids: list[int]) -> Any:
    logits = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits
    return torch.stack([one.topk(TOP_K, -1).indices for one in logits], 1).sort(-1)[0].numpy()


@pytest.mark.parametrize("kind", ["plain", "branches", "folds"])
async def test_every_token_that_passed_is_told_of_once(kind: str) -> None:
    more: dict[str, Any] = {"branches": {"branching": Branching(2, 2)}}.get(kind, {})
    if kind == "folds":
        more = {"folding": Folding(fold, 90, 5)}
    model = build_model()
    async with Talkative(model, return_routed_experts=True) as engine:
        group = await play(engine, **more)
    contexts = [assert_told(model, episode) for episode in group]
    assert (max(contexts) > 1) == (kind == "folds")
    assert len(set(engine.asked)) > 3  # a turn asks for what is new in it
    if kind == "branches":
        assert len({t.token_ids[-1] for t in group}) > 1


async def test_a_learner_takes_them_and_agrees_with_the_engine() -> None:
    """Told by an engine of the same weights: nothing disagrees, and its logprobs are the learner's."""
    model = build_model()
    async with Talkative(model, return_routed_experts=True) as engine:
        group = await play(engine, 6, folding=Folding(fold, 90, 5))
    credit = assign_credit([group], lambda groups: [[t.reward - 3.0 for t in g] for g in groups])  # type: ignore[operator]
    samples = credit.samples()
    learner = Learner(model, [torch.optim.SGD(model.parameters(), lr=0.0)], LossSettings(router_replay=True, threads=1))
    metrics = learner.update(samples)
    assert metrics["router/replay_disagreement"] == 0.0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    tokens = sum(len(s.token_ids) for s in samples)
    assert metrics["router/replayed"] == pytest.approx(1 - sum(len(s.starts) for s in samples) / tokens)
    for sample in samples:
        ends = [*sample.starts[1:], len(sample.token_ids)]
        (known,) = {tuple(sorted(p + i for p, r in sample.routed_experts for i in range(len(r))))}
        assert known == tuple(i for i in range(len(sample.token_ids)) if i + 1 not in ends)


async def test_an_engine_that_rounds_otherwise_is_nearer_to_a_learner_that_replays() -> None:
    """bfloat16 beside float32: what is left of the difference is rounding, without tokens that went elsewhere."""
    model = build_model()
    async with Talkative(model, return_routed_experts=True, dtype=torch.bfloat16) as engine:
        groups = [await play(engine, 8), await play(engine, 8, folding=Folding(fold, 90, 5))]
    credit = assign_credit(groups, lambda groups: [[1.0 for _ in g] for g in groups])
    apart = []
    for replays in (False, True):
        settings = LossSettings(router_replay=replays, threads=1, router_aux_loss_coef=0.0)
        metrics = Learner(model, [torch.optim.SGD(model.parameters(), lr=0.0)], settings).update(credit.samples())
        apart.append(metrics["sampling/sampling_logp_difference/mean"])
        disagreement = metrics.get("router/replay_disagreement", 0.0)
    print(f"\nmean |logp - sampled logp|: {apart[0]:.4f}, replayed {apart[1]:.4f}; {disagreement:.2%} disagree")
    assert 0.0 < disagreement < 0.2
    assert apart[1] < 0.85 * apart[0]


async def test_requests_of_an_agent_tell_them_in_each_of_their_threads() -> None:
    model = build_model()
    async with Talkative(model, return_routed_experts=True) as engine:
        engine.asked = []
        context = EpisodeContext(EnvSpec(Chat), engine, ByteRenderer(), LIMITS, SAMPLING)
        forest = ThreadForest(context, context.renderer, 1, "session", goes_on_when_cut=True)
        asked: list[Any] = [{"role": "user", "content": "a long question, " * 4}]
        first = await forest.complete(asked, [])
        asked = [*asked, first.message, {"role": "user", "content": "and now?"}]
        second = await forest.complete(asked, [])
        other = [*asked[:2], {"role": "user", "content": "otherwise?"}]  # goes on from the first turn again
        await forest.complete(other, [])
        await forest.complete([*asked, second.message, {"role": "user", "content": "bye"}], [])
    assert len(forest.threads) == 2
    places = [count_routed(thread.segments) for thread in forest.threads]
    assert places == [sum(len(s.token_ids) for s in t.segments) - 1 for t in forest.threads]
    episode = Trajectory(0, tuple(s for t in forest.threads for s in t.segments), (), "terminated")  # type: ignore[arg-type]
    assert assert_told(model, episode) == 2
    assert engine.asked[2] == 0  # a thread begins anew


def test_tokens_that_nobody_told_of_are_asked_for_again() -> None:
    rng = random.Random(0)
    said = draw_experts(rng, 5)
    prompt, silent = Segment("prompt", (1, 2, 3)), Segment("model", (4, 5), (0.0,) * 2, (0,) * 2)
    told = Segment("model", (4, 5, 6), (0.0,) * 3, (0,) * 3, None, said)
    assert count_routed([prompt]) == count_routed([prompt, silent]) == count_routed([]) == 0
    assert count_routed([prompt, told]) == 5
    assert count_routed([prompt, told, Segment("env", (7,)), silent]) == 5
    assert count_routed([prompt, told, prompt]) == 0  # another context
    late = Segment("model", (4, 5, 6), (0.0,) * 3, (0,) * 3, None, said.take(2, 5))
    assert count_routed([prompt, late]) == 0  # the first ones are still to be told


def test_a_row_has_the_experts_of_its_trained_contexts_alone() -> None:
    """The first context has nothing that is trained; the last one is cut behind its last trained token."""
    rng = random.Random(0)

    def turn(tokens: int, told: int) -> Segment:
        return Segment("model", (9,) * tokens, (-1.0,) * tokens, (0,) * tokens, None, draw_experts(rng, told))

    segments = (
        *(Segment("prompt", (1, 2)), Segment("env", (3,))),
        *(Segment("prompt", (1, 2, 3)), turn(2, 4), Segment("env", (5, 5)), turn(3, 5)),
        *(Segment("prompt", (1, 2)), turn(2, 3), Segment("env", (6,))),
    )
    episode = Trajectory(0, segments, (), "terminated", rewards={"r": 1.0})  # type: ignore[arg-type]
    credit = assign_credit([Group(0, (episode, episode))], lambda groups: [[1.0 for _ in g] for g in groups])
    row = credit.samples()[0]
    assert row.starts == (0, 10)
    assert [(place, len(routed)) for place, routed in row.routed_experts] == [(0, 4), (4, 5), (10, 3)]
    assert [r for _, r in row.routed_experts] == [s.routed_experts for s in segments if s.author == "model"]
    for (place, routed), (after, _) in pairwise(row.routed_experts):
        assert place + len(routed) <= after
