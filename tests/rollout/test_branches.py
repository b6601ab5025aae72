"""Episodes that share their beginning, and groups that begin more episodes than they need."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import anyio
import pytest
from agentrl_tools.python import Python
from agentrl_tools.shell import Shell
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import ContractError, Env, EnvSpec, InfraError, Reply, Step, ToolEnv, Toolset, Trajectory, tool
from agentrl.credit import TRAINED, assign_credit
from agentrl.learner.prefix_tree.tree import build_forest
from agentrl.rollout.episode import Branching
from agentrl.rollout.rollout import Rollout
from agentrl.runs import metrics
from agentrl.settings.catalogue import list_own_entries
from agentrl.testing import STOP, ByteRenderer, ScriptedEngine, call
from agentrl.types import Completion, Observation

ADVANTAGES = dict(list_own_entries("advantage"))


class Walk(Env):
    """Remembers every word; worth how many it heard are odd."""

    open = 0

    def __init__(self, length: int = 4, seconds: float = 0.0, broken: int = 0) -> None:
        self.length, self.seconds, self.broken = length, seconds, broken

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        type(self).open += 1
        self.heard: list[str] = []
        return "walk " * 10, {}

    async def step(self, action: Reply) -> Step:
        self.heard.append(action.content)
        await anyio.sleep(self.seconds)
        return Step(f"at {len(self.heard)}", 0.0, len(self.heard) == self.length, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        assert len(self.heard) == trajectory.turns
        return {"odd": float(sum(int(word) % 2 for word in self.heard))}

    def clone(self) -> Env:
        if self.broken:
            self.broken -= 1
            if not self.broken:
                raise RuntimeError("no room")
        type(self).open += 1
        return copy.deepcopy(self)

    async def close(self) -> None:
        type(self).open -= 1


class Dice(ScriptedEngine):
    """Says a number drawn by its seed; as slow as the script says of it."""

    def __init__(self, seconds: Any = lambda said: 0.0) -> None:
        super().__init__([""])
        self.seconds = seconds

    async def generate(self, token_ids: Any, params: Any, *, session: str) -> Any:
        word = params.seed % 997
        await anyio.sleep(self.seconds(word))
        ids = (*str(word).encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")


def played(size: int, *, turn: int = 2, branches: int = 2, **env: Any) -> Any:
    rollout = Rollout(EnvSpec(Walk, **env), Dice(), ByteRenderer(), branching=Branching(turn, branches))
    group = anyio.run(rollout.group, 0, size)
    assert Walk.open == 0
    assert not rollout.running
    return group


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_branches_share_their_beginning_and_nothing_else(trees: int, branches: int, turn: int) -> None:
    group = played(trees * branches, turn=turn, branches=branches)
    words = [[m["content"] for m in t.messages if m["role"] == "assistant"] for t in group]
    assert all(len(own) == 4 for own in words)
    for tree in range(trees):
        own = words[tree * branches : (tree + 1) * branches]
        assert len({tuple(w[:turn]) for w in own}) == 1
        assert len({tuple(w) for w in own}) == branches
    assert len({tuple(w[:1]) for w in words}) == (trees if turn else trees * branches)
    for t, own in zip(group, words, strict=True):
        assert t.reward == sum(int(str(w)) % 2 for w in own)


def test_what_branches_share_goes_through_the_model_once() -> None:
    group = played(8, turn=3, branches=8)
    rows = [
        e.sample()
        for e in assign_credit([group], ADVANTAGES["dr_grpo"], reduce=lambda lengths: [1.0] * len(lengths))
        if e.outcome == TRAINED
    ]
    if len(rows) > 1:
        shared = 10 * 5 + 3 * 8
        assert (
            len(build_forest(sorted(r.token_ids for r in rows)).token_ids)
            < sum(len(r.token_ids) for r in rows) - (len(rows) - 1) * shared
        )


def test_an_episode_that_ends_before_has_others_in_its_place() -> None:
    group = played(4, turn=3, branches=4, length=2)
    assert len(group.trajectories) == 4
    assert len({tuple(t.token_ids) for t in group}) == 4


def test_a_clone_that_fails_is_the_world_s_fault() -> None:
    group = played(3, turn=1, branches=3, broken=2)  # the second of two
    kinds = [t.fault.kind if t.fault else None for t in group]
    assert kinds == ["env_clone", None, None]


async def test_an_environment_that_cannot_be_cloned_is_told() -> None:
    class Plain(Walk):
        clone = Env.clone

    rollout = Rollout(EnvSpec(Plain), Dice(), ByteRenderer(), branching=Branching(1, 2))
    with pytest.raises(ContractError, match=r"Plain has no method `clone`, which rollout\.branches needs"):
        await rollout.group(0, 2)
    assert Plain.open == 0


async def test_with_episodes_to_spare_the_slowest_are_cancelled() -> None:
    said: list[Trajectory] = []
    rollout = Rollout(EnvSpec(Walk), Dice(lambda word: 30.0 if word % 3 == 0 else 0.0), ByteRenderer(), oversample=30)
    with anyio.fail_after(60):
        group = await rollout.group(0, 4, on_episode=said.append)
    assert len(group.trajectories) == len(said) == 4
    assert not any(int(m["content"]) % 3 == 0 for t in group for m in t.messages if m["role"] == "assistant")
    assert Walk.open == 0


class Basket(ToolEnv):
    """Worth how many things lie in the basket; a turn puts as many into it as its seed says."""

    tools: Sequence[Any] = ()
    max_turns = 3

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.things = 0
        return self.ask("fill it"), {}

    @tool
    async def put(self, n: int) -> str:
        """Put things into the basket."""
        self.things += n
        return f"{self.things} in it"

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        assert len(self.call_records) == trajectory.turns
        return {"things": float(self.things)}

    def clone(self) -> Env:
        return copy.copy(self)


class Puts(ScriptedEngine):
    """Puts as many things as its seed says."""

    def __init__(self) -> None:
        super().__init__([""])

    async def generate(self, token_ids: Any, params: Any, *, session: str) -> Any:
        ids = (*call("put", n=1 + params.seed % 50).encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")


async def filled(cls: type[Env], branches: int = 3) -> Any:
    async with EnvSpec(cls).open() as spec:
        rollout = Rollout(spec, Puts(), ByteRenderer(), branching=Branching(1, branches))
        return await rollout.group(0, branches)


def put_in(trajectory: Trajectory) -> int:
    """By what was asked."""
    asked = [c for m in trajectory.messages for c in m.get("tool_calls", ())]
    return sum(c["function"]["arguments"]["n"] for c in asked)


class Deep(Basket):
    def clone(self) -> Env:
        return copy.deepcopy(self)


@pytest.mark.parametrize("cls", [Basket, Deep])
async def test_the_tools_of_a_branch_act_on_the_branch(cls: type[Env]) -> None:
    """The tools of a copy.copy used to act on the trunk, and its records were the trunk's."""
    group = await filled(cls)
    assert [t.reward for t in group] == [float(put_in(t)) for t in group]
    assert len({t.reward for t in group}) == 3
    assert [[c.turn for c in t.calls] for t in group] == [[0, 1, 2]] * 3
    said = [[m["content"] for m in t.messages if m["role"] == "tool"] for t in group]
    assert [words[-1] for words in said] == [f"{put_in(t)} in it" for t in group]


class Ledger(Toolset):
    """Remembers for each episode."""

    def begin(self) -> None:
        self.lines: list[int] = []

    @tool
    async def put(self, n: int) -> str:
        """Put things."""
        self.lines.append(n)
        return f"{sum(self.lines)} in it"


class Forked(Ledger):
    def fork(self) -> Self:
        own = copy.copy(self)
        own.lines = list(self.lines)
        return own


def with_tools(*given: Any) -> type[Env]:
    class Plain(ToolEnv):
        tools = given
        max_turns = 3

        async def reset(
            self, *, seed: int, options: Mapping[str, Any] | None = None
        ) -> tuple[Observation, dict[str, Any]]:
            return self.ask("fill it"), {}

        def clone(self) -> Env:
            return copy.copy(self)

    return Plain


async def test_a_toolset_is_forked_or_refused_by_name() -> None:
    for t in await filled(with_tools(Forked)):
        assert [m["content"] for m in t.messages if m["role"] == "tool"][-1] == f"{put_in(t)} in it"
    with pytest.raises(ContractError, match=r"the toolset Ledger cannot be forked: .* has no method fork"):
        await filled(with_tools(Ledger))


async def test_the_toolsets_that_ship_say_whether_they_can_be_forked() -> None:
    for toolset, why in (
        (Python(state=True), "Python cannot be forked: with state = true"),
        (Shell(), "Shell cannot be forked: its files and processes"),
    ):
        with pytest.raises(ContractError, match=why):
            toolset.fork()
    plain = Python().start_episode("the servers")
    assert plain.fork() is not plain
    assert plain.fork().shared == "the servers"


async def test_a_tool_that_is_bound_to_the_trunk_is_refused_by_name() -> None:
    class Bound(Basket):
        async def reset(
            self, *, seed: int, options: Mapping[str, Any] | None = None
        ) -> tuple[Observation, dict[str, Any]]:
            @tool(name="take")
            async def take(n: int) -> str:
                """Take things out."""
                self.things -= n
                return "taken"

            self.tools = [take]
            return await super().reset(seed=seed, options=options)

    with pytest.raises(ContractError, match="the tool 'take' of a clone acts on the Bound that was cloned"):
        await filled(Bound)


def test_a_deep_copy_shares_what_belongs_to_the_run_and_nothing_of_the_episode() -> None:
    env = Deep()
    env.shared, env.things = {"pool": threading.Lock()}, 3
    env.words = ["a"]  # type: ignore[attr-defined]
    assert [t.name for t in env.tool_list] == ["put"]
    other = copy.deepcopy(env)
    assert other.shared is env.shared
    assert other.words == ["a"]  # type: ignore[attr-defined]
    assert other.words is not env.words  # type: ignore[attr-defined]
    assert "_tools" not in vars(other)


class Doomed(Basket):
    """The trunk fails at its second turn, and its clones do not."""

    cloned = False

    @tool
    async def put(self, n: int) -> str:
        """Put things into the basket."""
        if self.things and not self.cloned:
            raise InfraError("gone", "the world is gone")
        self.things += n
        return f"{self.things} in it"

    def clone(self) -> Env:
        other = copy.copy(self)
        other.cloned = True
        return other


@pytest.mark.parametrize(
    ("cls", "calls", "turns"), [(Basket, 1 + 3 * 2, 1 + 3 * 2), (Doomed, 1 + 1 + 2 * 2, 1 + 2 * 2)]
)
async def test_what_branches_share_is_counted_once(cls: type[Env], calls: int, turns: int) -> None:
    """The trunk's tokens and calls used to be counted once a branch; a trunk that is lost takes none with it."""
    async with EnvSpec(cls).open() as spec:
        rollout = Rollout(spec, Puts(), ByteRenderer(), branching=Branching(1, 3))
        group = await rollout.group(0, 3)
    found = metrics.group_metrics([group])
    assert found["tools/put/calls"] == calls
    fair = [t for t in group if t.fault is None]
    said = {id(s): len(s.token_ids) for t in fair for s in t.segments if s.author == "model"}
    assert len(said) == turns
    assert found["sampled_tokens"] == sum(said.values())
    assert found["tools/call_frequency"] == found["turns/mean"] == 3  # of an episode, with all that led to it
    if cls is Basket:
        assert found["sampled_tokens"] == rollout.tokens
    for t in group:
        assert t.timings["total"] >= sum(s for name, s in t.timings.items() if name != "total") - 1e-9


def test_a_trunk_that_could_not_be_cloned_counts_its_own() -> None:
    group = played(3, turn=1, branches=3, broken=1)
    assert [t.shared_turns for t in group] == [0, 0, 0]
    assert metrics.group_metrics([group], 1)["sampled_tokens"] == sum(
        t.sampled_tokens for t in group if t.fault is None
    )
