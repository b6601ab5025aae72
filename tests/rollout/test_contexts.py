"""Episodes of several contexts: what is sampled in which, that it is trained once, and that all counts fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from agentrl import Env, EnvSpec, Reply, Step, ToolEnv, Trajectory, tool
from agentrl.credit import assign_credit
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.learner.learner import Learner, LossSettings
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.episode import Branching, EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.runs import metrics
from agentrl.settings.catalogue import list_own_entries
from agentrl.types import Completion, Group, SamplingParams, Segment, Stop
from tests.helpers.families import family
from tests.helpers.tiny import qwen3

ADVANTAGES = dict(list_own_entries("advantage"))


class Chat(ToolEnv):
    """Answers each turn without a call by another question."""

    max_turns = 4

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.answers = 0
        return f"What is {seed}?", {}

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    async def step(self, reply: Reply) -> Step:
        if reply.tool_calls:
            return await super().step(reply)
        self.answers += 1
        return Step("And then?", 0.0, False, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"any": float(sum(trajectory.token_ids) % 97)}

    def clone(self) -> Env:
        other = type(self)()
        other.answers = self.answers
        return other


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SAID = [
    f"<think>\nI add\n</think>\n\n{CALL}",
    "<think>\nI know\n</think>\n\nIt is 3.",
    "<think>\n4\n</think>\n\n4",
    "x",
]


class Speaker:
    """Says ``SAID``, or another script, in the tokens of a family."""

    capacity, max_context, version = 64, 1 << 20, 0

    def __init__(self, script: Sequence[str] = SAID) -> None:
        self.script, self.turns, self.contexts = script, dict[str, int](), list[list[int]]()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        self.contexts.append(list(token_ids))
        await anyio.lowlevel.checkpoint()
        ids = renderer().encode_turn(self.script[min(turn, len(self.script) - 1)] + "<|im_end|>")[: params.max_tokens]
        n, stops = len(ids), ids[-1] in params.stop_token_ids
        return Completion(tuple(ids), (-0.5,) * n, (0,) * n, "stop" if stops else "length")

    def end_session(self, session: str) -> None: ...

    async def update_weights(self, policy: Any, version: int) -> None: ...

    async def close(self) -> None: ...


@cache
def renderer(history: Any = "as_template", **words: Any) -> TemplateRenderer:
    return TemplateRenderer(family("qwen3").tokenizer, words=words, history=history)


def play(engine: Any, own: TemplateRenderer, size: int = 1, **more: Any) -> Group:
    limits = {k: more.pop(k) for k in list(more) if k in EpisodeLimits.__dataclass_fields__}

    async def roll_out() -> Group:
        async with EnvSpec(Chat).open() as spec:
            rollout = Rollout(spec, engine, own, limits=EpisodeLimits(**limits), **more)
            return await rollout.group(3, size)

    return anyio.run(roll_out)


def authors(trajectory: Trajectory) -> str:
    return " ".join("".join(s.author[0] for s in context) for context in trajectory.contexts)


def test_an_episode_goes_on_in_another_context_where_the_template_drops_a_thought() -> None:
    """A tool's answer is appended to the thought; behind the user's next words the thoughts before are gone."""
    engine = Speaker()
    (episode,) = play(engine, renderer())
    assert (episode.stop, episode.turns) == (Stop.MAX_TURNS, 4)
    assert authors(episode) == "pmem pem peme"
    turns = [(c, i) for c, context in enumerate(episode.contexts) for i, s in enumerate(context) if s.author == "model"]
    before = [[t for s in episode.contexts[c][:i] for t in s.token_ids] for c, i in turns]
    assert before == engine.contexts
    thoughts = [renderer().decode(context).count("<think>") for context in engine.contexts]
    assert thoughts == [0, 1, 0, 0]
    asked = [*family("qwen3").tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd then?", add_special_tokens=False)]
    assert [list(o[: len(asked) - 1]) for o in episode.observed[2:]] == [asked[1:]] * 2
    (kept,) = play(Speaker(), renderer("as_sampled"))
    assert authors(kept) == "pmememem" + "e" * (kept.segments[-1].author == "env")
    assert [s.token_ids for s in kept.segments if s.author == "model"] == [
        s.token_ids for s in episode.segments if s.author == "model"
    ]


def test_a_call_that_cannot_be_read_stays_as_it_was_written() -> None:
    broken = CALL.replace('"a"', "a")
    engine = Speaker([f"<think>\nI add\n</think>\n\nSo: {broken}", SAID[1], SAID[2]])
    (episode,) = play(engine, renderer())
    assert [c.status for c in episode.calls] == ["parse"]
    assert authors(episode).startswith("pmem pem")
    shown = renderer().decode(engine.contexts[2])
    assert f"assistant\nSo: {broken}<|im_end|>" in shown
    assert "I add" not in shown


@pytest.mark.parametrize("limit", [30, 60, 90])
def test_the_tokens_of_an_episode_are_those_behind_its_prompts(limit: int) -> None:
    (episode,) = play(Speaker(), renderer(), max_episode_tokens=limit)
    (whole,) = play(Speaker(), renderer())
    behind = [len(s.token_ids) for s in episode.segments if s.author != "prompt"]
    assert episode.stop == Stop.MAX_TOKENS
    sampled = [len(s.token_ids) for s in episode.segments if s.author == "model"]
    assert sum(behind[: behind.index(sampled[-1])]) < limit <= sum(behind)
    assert sampled[:-1] == [len(s.token_ids) for s in whole.segments if s.author == "model"][: len(sampled) - 1]


def test_branches_of_an_episode_begin_contexts_of_their_own() -> None:
    group = play(Speaker(), renderer(), size=2, branching=Branching(2, 2))
    assert [t.shared_turns for t in group] == [0, 2]
    assert [authors(t)[:8] for t in group] == ["pmem pem"] * 2
    sampled = {id(s): len(s.token_ids) for t in group for s in t.segments if s.author == "model"}
    assert metrics.group_metrics([group])["sampled_tokens"] == sum(sampled.values())


@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_what_was_sampled_is_trained_once_in_the_context_it_was_sampled_in(packing: str) -> None:
    """The embedded engine samples; a plain forward pass over each turn's context is the judge of both."""
    own = renderer(enable_thinking=False)  # the prompt has an empty thought, which goes as soon as the user speaks
    model = qwen3(vocab_size=len(own.tokenizer), max_position_embeddings=2048)
    group = play(Stopping(TransformersEngine(model)), own, size=4, max_tokens=9, max_turns=3)
    assert {authors(t) for t in group} == {"pm pem pem pe"}
    credit = assign_credit([group], ADVANTAGES["dr_grpo"])
    rows = credit.samples()
    assert [sum(row.loss_mask) for row in rows] == [t.sampled_tokens for t in group] == [27] * 4
    settings = LossSettings(packing=packing, max_tokens_per_microbatch=1500, threads=1)
    learner = Learner(model, [torch.optim.SGD(model.parameters(), lr=0.0)], settings)
    found = learner.update(rows, credit.weights())
    assert (found["scored_rows"], found["scored_tokens"]) == (4, 4 * 27)
    for t, old in zip(group, learner.old_logprobs, strict=True):
        judged = [logprob for context in t.contexts for logprob in judge(model, context)]
        sampled = [p for s in t.segments if s.author == "model" for p in s.logprobs or ()]
        assert old is not None
        assert sampled == pytest.approx(judged, abs=1e-5)
        assert old.tolist() == pytest.approx(judged, abs=1e-5)


class Stopping:
    """An engine whose turns end after their tokens, whatever the model would say."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        done = await self.engine.generate(token_ids, params, session=session)
        return done.cut(len(done.token_ids))


@torch.no_grad()
def judge(model: Any, context: Sequence[Segment]) -> list[float]:
    """Compute the logprobs of the sampled tokens of a context by the model's own pass over it alone."""
    ids = torch.tensor([[t for s in context for t in s.token_ids]])
    logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    own = [s.author == "model" for s in context for _ in s.token_ids]
    return [float(logprobs[at - 1, ids[0, at]]) for at, mine in enumerate(own) if mine]
