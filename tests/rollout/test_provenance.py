"""Faults that an episode provoked: who is found to have done so, what they earn, and that they cannot be bought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agentrl import Env, EnvSpec, InfraError, Reply, Step, ToolEnv, Trajectory, tool
from agentrl.credit import FAULT, PROVOKED, TRAINED, Credit, assign_credit
from agentrl.learner.advantages.group import gdpo, grpo, rloo
from agentrl.learner.advantages.turn import first_turn, gigpo, rebn
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.provenance import EndedEpisodes, settle_faults
from agentrl.rollout.rollout import Rollout
from agentrl.runs import metrics
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.tools.provenance import DOWN
from agentrl.types import Fault, Group, JsonSchema, Observation, Segment, Stop


class Quiz(Env):
    """Say how much the answer is worth; what is no number makes the scoring fail."""

    max_turns = 1

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        return "?", {}

    async def step(self, action: Reply) -> Step:
        return Step([], 0.0, True, False, {})

    async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
        if trajectory.answer == "wait":
            await anyio.sleep(60)
        return {"said": float(trajectory.answer)}


class Checked(Quiz):
    """One that can tell whether its world works."""

    healthy = True

    async def health_check(self) -> None:
        if not self.healthy:
            raise OSError("the judge does not answer")


class Broken(Checked):
    healthy = False


def say(*answers: str) -> Any:
    """Answer in turn, over all episodes."""
    left, own = iter(answers), dict[str, str]()
    return lambda session, turn: own.setdefault(session, next(left, answers[-1]))


def rollout(env: type[Env], script: Any, **limits: Any) -> Rollout:
    return Rollout(EnvSpec(env), ScriptedEngine(script), ByteRenderer(), limits=EpisodeLimits(**limits))


async def play(env: type[Env], *answers: str) -> Group:
    (group,) = await rollout(env, say(*answers)).batch([0], len(answers))
    return group


def outcomes(credit: Credit) -> list[str]:
    return [e.outcome for e in credit]


async def test_an_answer_that_breaks_the_scoring_earns_the_floor() -> None:
    group = await play(Quiz, "1", "0.5", "boom", "0.25")
    broke = group.trajectories[2]
    assert broke.fault is not None
    assert (broke.fault.provoked, broke.fault.kind, broke.stop) == (True, "env_score", Stop.FAULT)
    assert broke.fault.message.startswith("provoked by its own request")
    assert (broke.reward, dict(broke.rewards)) == (0.0, {"said": 0.0})
    credit = assign_credit([group], grpo)
    assert outcomes(credit) == [TRAINED, TRAINED, PROVOKED, TRAINED]
    numbers = metrics.group_metrics([group])
    assert numbers["faults/provoked"] == 1.0
    assert "faults/env_score" not in numbers
    assert numbers["reward"] == pytest.approx(1.75 / 4)


async def test_the_floor_is_the_lowest_of_the_group_where_that_is_lower() -> None:
    group = await play(Quiz, "1", "-3", "boom")
    assert [t.reward for t in group] == [1.0, -3.0, -3.0]


async def test_an_environment_may_declare_a_lower_floor() -> None:
    class Punishing(Quiz):
        worst_reward = -1.0

    group = await play(Punishing, "1", "0.5", "boom")
    assert [t.reward for t in group] == [1.0, 0.5, -1.0]


def test_the_floor_takes_each_component_at_its_worst() -> None:
    def episode(rewards: Mapping[str, float | None], fault: Fault | None = None) -> Trajectory:
        own = Segment("model", (1,), (0.0,), (0,))
        weights = {"a": 2.0, "cost": -1.0}
        return Trajectory(0, (Segment("prompt", (0,)), own), (), Stop.TERMINATED, rewards, weights, fault=fault)

    members = [
        episode({"a": 0.5, "cost": 0.1, "b": None}),
        episode({"a": 0.25, "cost": 0.4}),
        episode({}, Fault("x", "", True)),
    ]
    floored = settle_faults(members, EndedEpisodes(), worst=0.0)[2]
    assert dict(floored.rewards) == {"a": pytest.approx(0.2), "cost": 0.4}
    assert floored.reward == pytest.approx(0.0)
    (alone,) = settle_faults(members[2:], EndedEpisodes(), worst=-2.0)
    assert alone.reward == -2.0


@pytest.mark.parametrize("rule", [grpo, rloo, gdpo, rebn, first_turn, gigpo])
async def test_it_is_worth_what_the_worst_answer_beside_it_is(rule: Any) -> None:
    group = await play(Quiz, "1", "0", "boom", "0.5")
    credit = assign_credit([group], rule)
    worst, provoked = (e for e in credit if e.trajectory.reward == 0.0)
    assert provoked.outcome == PROVOKED
    assert provoked.advantage == worst.advantage
    assert worst.mean_advantage is not None
    assert worst.mean_advantage < 0
    assert provoked.weight == worst.weight
    assert any(provoked.sample().advantages)


async def test_what_a_user_masks_does_not_hide_it() -> None:
    group = await play(Quiz, "1", "0", "boom")
    assert outcomes(assign_credit([group], grpo, mask_stop_reasons=frozenset({Stop.FAULT})))[2] == PROVOKED


async def test_where_a_whole_group_faults_it_is_the_tasks() -> None:
    running = rollout(Quiz, say("1", "1", "boom", "boom"))
    good, bad = await running.batch([0, 1], 2)
    assert [t.fault for t in good] == [None, None]
    assert [t.fault.provoked for t in bad if t.fault] == [False, False]
    assert outcomes(assign_credit([good, bad], grpo))[2:] == [FAULT, FAULT]


@pytest.mark.parametrize(("env", "provoked"), [(Checked, True), (Broken, False)])
async def test_an_environments_health_check_decides(env: type[Env], provoked: bool) -> None:
    group = await play(env, "boom", "boom", "1")
    assert [t.fault.provoked for t in group if t.fault] == [provoked] * 2
    assert [t.reward for t in group] == ([0.0, 0.0, 1.0] if provoked else [None, None, 1.0])


@pytest.mark.parametrize("limits", [{"turn_timeout_s": 0.1}, {"turn_timeout_s": 60, "episode_timeout_s": 0.5}])
async def test_an_answer_that_makes_the_environment_slow_earns_the_floor_too(limits: dict[str, float]) -> None:
    t = await rollout(Checked, ["wait"], **limits).episode(0)
    assert t.fault is not None
    assert (t.fault.provoked, t.reward) == (True, 0.0)


async def test_a_slow_engine_is_nobodys_request() -> None:
    running = rollout(Checked, ["1"], episode_timeout_s=0.1)
    running.engine = ScriptedEngine(["1"], latency_s=60)
    t = await running.episode(0)
    assert t.fault is not None
    assert (t.fault.provoked, t.reward) == (False, None)


async def test_seconds_of_an_answer_count_once() -> None:
    running = rollout(Checked, ["wait"], turn_timeout_s=60, episode_timeout_s=1.0)
    running.engine = ScriptedEngine(["wait"], latency_s=0.6)
    t = await running.episode(0)
    assert t.fault is not None
    assert (t.fault.kind, t.fault.provoked) == ("episode_timeout", False)


async def test_a_reset_that_fails_is_the_worlds() -> None:
    class Unreset(Checked):
        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            raise InfraError("dataset", "no such row")

    t = await rollout(Unreset, ["1"]).episode(0)
    assert t.fault is not None
    assert t.fault.provoked is False


def test_an_outage_is_the_worlds_and_a_fault_between_good_ends_is_not() -> None:
    ended, faults = EndedEpisodes(), [Fault("x", "", None) for _ in range(DOWN)]
    for fault in (None, *faults, None):
        ended.add(fault)
    assert not any(ended.is_provoked(f) for f in faults)
    lonely = Fault("x", "", None)
    for end in (None, lonely, None):
        ended.add(end)
    assert ended.is_provoked(lonely)
    assert not ended.is_provoked(Fault("x", "of nobody", None))


def test_a_hiccup_in_many_episodes_is_nobodys() -> None:
    ended, hiccup = EndedEpisodes(), Fault("x", "", None)
    for end in (*[None] * 60, hiccup, *[None] * 60):
        ended.add(end)
    assert not ended.is_provoked(hiccup)
    for _ in range(3):
        ended.add(Fault("x", "", None))
        ended.add(None)
    assert ended.is_provoked(hiccup)


class Searching(ToolEnv):
    """A tool that a request can crash; what counts is whether the answer is tea."""

    max_turns = 3

    @tool
    async def search(self, query: str) -> str:
        """Search."""
        if query == "crash":
            raise InfraError("search_down", "it went away")
        return "tea"

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        return "?", {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"tea": float(trajectory.answer == "tea")}


async def test_a_crashed_call_is_an_error_to_read_and_the_episode_goes_on() -> None:
    def script(session: str, turn: int) -> str:
        queries = asked.setdefault(session, "crash" if len(asked) == 3 else "x")
        return call("search", query=queries) if turn == 0 else "tea"

    asked: dict[str, str] = {}
    (group,) = await rollout(Searching, script).batch([0], 4)
    assert [t.fault for t in group] == [None] * 4
    crashed = group.trajectories[3]
    assert [c.status for c in crashed.calls] == ["provoked"]
    (answer,) = [m for m in crashed.messages if m["role"] == "tool"]
    assert answer["content"] == "error: tool 'search' failed on this request (search_down)"
    assert answer["is_error"]
    assert crashed.reward == 1.0
    numbers = metrics.group_metrics([group])
    assert (numbers["faults/provoked"], numbers["tools/error/provoked"]) == (1.0, 0.25)


# ---- a policy that learns to fault


class Cards:
    """Tokens of a game: a card to see, and moves of one token each, of which a half breaks the world."""

    EASY, HARD, SIZE = 0, 1, 32

    def __init__(self) -> None:
        self.injection_attempts: Counter[str] = Counter()

    def render_ids(self, messages: Sequence[Any], *, tools: Sequence[Any] = ()) -> list[int]:
        return [self.HARD if messages[0]["content"] == "hard" else self.EASY]

    def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, messages: Any, *, tools: Any = ()) -> list[int]:
        return [*prompt_ids, *completion_ids, self.EASY]

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[JsonSchema] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        return Reply(str(token_ids[-1]))

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def with_words(self, words: Any) -> Any:
        return self

    def get_stop_token_ids(self) -> list[int]:
        return list(range(self.SIZE))


def breaks_the_world(token: int) -> bool:
    return token % 2 == 1


class Hand(Env):
    """Half of the hands are lost whatever is played, and each player sees whether the own one is."""

    max_turns = 1
    dealt = 0

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        self.hard = Hand.dealt % 2
        Hand.dealt += 1
        return ("hard" if self.hard else "easy"), {}

    async def step(self, action: Reply) -> Step:
        if breaks_the_world(int(action.content)):
            raise InfraError("sandbox_gone", "the machine does not answer")
        return Step([], 0.0, True, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"won": 1.0 - self.hard}


async def train(steps: int, bought: bool) -> list[float]:
    """Train a tiny transformer; return the share of faults in the hands that are lost, a step each."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from agentrl.engines.embedded.engine import TransformersEngine
    from agentrl.learner.learner import Learner, LossSettings

    torch.manual_seed(0)
    Hand.dealt = 0
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": Cards.SIZE, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    policy = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None)).eval()
    learner = Learner(policy, [torch.optim.Adam(policy.parameters(), lr=0.02)], LossSettings(threads=1))
    shares = []
    async with TransformersEngine(policy, threads=1, snapshot=True) as engine:
        running = Rollout(EnvSpec(Hand), engine, Cards(), limits=EpisodeLimits(max_tokens=1))
        for step in range(steps):
            groups = await running.batch([0, 1, 2, 3], 16, seed=step)
            if bought:  # the rule that was: no fault is anybody's, and none is trained
                groups = [Group(g.task, tuple(_forgiven(t) for t in g)) for g in groups]
            lost = [t for g in groups for t in g if t.token_ids[0] == Cards.HARD]
            shares.append(sum(breaks_the_world(t.token_ids[1]) for t in lost) / len(lost))
            credit = assign_credit(groups, grpo)
            learner.update(credit.samples(), credit.weights(), credit.updates())
            await engine.update_weights(policy, learner.version)
    return shares


def _forgiven(t: Trajectory) -> Trajectory:
    return t if t.fault is None else replace(t, rewards={}, fault=replace(t.fault, provoked=False))


@pytest.mark.slow
async def test_a_policy_learns_to_fault_where_that_is_free_and_not_where_it_earns_the_floor() -> None:
    free, settled = await train(20, bought=True), await train(20, bought=False)
    assert free[0] == settled[0] < 0.7
    assert sum(free[-5:]) / 5 > 0.9
    assert sum(settled[-5:]) / 5 < 0.3
