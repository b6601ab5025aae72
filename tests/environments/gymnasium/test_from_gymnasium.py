"""Gymnasium's environments as ours: observations in words, replies as actions; real environments."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import agentrl
from agentrl import ContractError, Env, EnvSpec, Reply, ToolError, Trajectory, UserError
from agentrl.environments.gymnasium import space_text
from agentrl.environments.gymnasium.from_gymnasium import Gym
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine

LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def shortest() -> list[str]:
    """The way over the lake, by breadth-first search."""
    ways: deque[tuple[tuple[int, int], list[str]]] = deque([((0, 0), [])])
    while True:
        (row, column), moves = ways.popleft()
        if LAKE[row][column] == "G":
            return moves
        for name, (down, right) in MOVES.items():
            r, c = row + down, column + right
            if 0 <= r < 4 and 0 <= c < 4 and LAKE[r][c] != "H" and len(moves) < 8:
                ways.append(((r, c), [*moves, name]))


async def play(*said: str, env: str | type[Env] = Gym, **settings: Any) -> Trajectory:
    async with EnvSpec(env, **settings).open() as spec:
        return await Rollout(spec, ScriptedEngine(said), ByteRenderer()).episode(3)


FROZEN: dict[str, Any] = {"name": "FrozenLake-v1", "make": {"is_slippery": False}}


@pytest.mark.parametrize("threads", [False, True])
async def test_the_shortest_way_over_the_lake(threads: bool) -> None:
    t = await play(*[f"Go \\boxed{{{move}}}." for move in shortest()], **FROZEN, threads=threads)
    assert (t.fault, t.reward, t.stop, t.turns) == (None, 1.0, "terminated", 6)
    assert "0 (left), 1 (down), 2 (right), 3 (up)" in t.messages[0]["content"]
    assert t.messages[0]["content"].endswith("observation: 0\n\n[S]FFF\nFHFH\nFFFH\nHFFG")


async def test_who_does_nothing_gets_nothing() -> None:
    t = await play("", **FROZEN, max_turns=5)
    assert (t.fault, t.reward, t.stop, t.turns) == (None, 0.0, "max_turns", 5)
    assert t.messages[2]["content"].startswith("error: '' is no action. Act by replying with one of")


async def test_its_time_limit_truncates() -> None:
    t = await play("left", name="FrozenLake-v1", make={"is_slippery": False, "max_episode_steps": 3})
    assert (t.reward, t.stop, t.turns) == (0.0, "truncated", 3)


async def test_a_class_for_train() -> None:
    lake = agentrl.from_gymnasium("FrozenLake-v1", make={"is_slippery": False}, max_turns=9)
    assert lake.__name__ == "FrozenLake-v1"
    t = await play(*shortest(), env=lake)
    assert (t.reward, EnvSpec(lake).make().max_turns) == (1.0, 9)
    with pytest.raises(TypeError, match="max_turn"):
        agentrl.from_gymnasium("FrozenLake-v1", max_turn=9)


async def test_a_task_is_the_same_each_time() -> None:
    async with EnvSpec(Gym, name="CartPole-v1").open() as spec:
        drawn = []
        for seed, split in ((3, "train"), (3, "train"), (4, "train"), (3, "test")):
            env = spec.make()
            drawn.append((await env.reset(seed=seed, options={"split": split}))[0])
            await env.close()
    assert drawn[0] == drawn[1]
    assert len(set(map(str, drawn))) == 3


async def test_a_clone_goes_its_own_way() -> None:
    async with EnvSpec(Gym, **FROZEN).open() as spec:
        env = spec.make()
        await env.reset(seed=0)
        other = env.clone()
        other.shared = env.shared
        for move in shortest():
            step = await env.step(Reply(move))
        assert (step.reward, step.terminated) == (1.0, True)
        assert "observation: 0" in str((await other.step(Reply("left"))).observation)
        await env.close()
        await other.close()


class Sentence(gymnasium.Env[str, str]):
    """Text in and out."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Text(50)
        self.action_space: spaces.Space[Any] = spaces.Text(10, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "say abc", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "over", float(action == "abc"), True, False, {}


async def test_text_by_a_function_that_makes_it() -> None:
    t = await play("A", "\\boxed{abc}", env=agentrl.from_gymnasium(Sentence))
    assert (t.reward, t.turns, t.messages[-1]["content"]) == (1.0, 2, "observation: over")


class Picture(Sentence):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space: spaces.Space[Any] = spaces.Box(0, 255, (64, 64, 3), np.uint8)


class Steering(Sentence):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("env", "settings", "sentence"),
    [
        (Picture, {}, "gym:Picture observes Box.*neither text nor up to 64 numbers"),
        (Steering, {}, r"gym:Steering takes Box\(.*; a reply can mean a Discrete, MultiDiscrete or Text"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "env.actions names 2 actions; gym:FrozenLake-v1 has 4"),
        ("FrozenLak-v1", {}, "gymnasium has no environment 'FrozenLak-v1'; did you mean 'FrozenLake"),
        ("FrozenLake-v1", {"make": {"slippery": False}}, "gym:FrozenLake-v1 with .*slippery.* cannot be made"),
        ("no_such_module:Lake-v1", {}, "cannot be made: .*no_such_module"),
    ],
)
async def test_what_cannot_be_played_is_a_sentence(env: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        await play("", env=agentrl.from_gymnasium(env, **settings))


@pytest.mark.parametrize(
    ("space", "reply", "action"),
    [
        (spaces.Discrete(4), "<think>\\boxed{1}</think> \\boxed{1} or \\boxed{ 2 }", 2),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Discrete(3), "SECOND", 1),
        (spaces.MultiDiscrete([3, 2]), "[2, 1]", [2, 1]),
        (spaces.MultiDiscrete([3, 2]), "\\boxed{0 1}", [0, 1]),
        (spaces.Text(5), "hello", "hello"),
    ],
)
def test_what_replies_mean(space: spaces.Space[Any], reply: str, action: Any) -> None:
    found = space_text.parse_action(space, reply, ["first", "second", "third"])
    assert np.array_equal(found, action)
    assert space.contains(found)


@pytest.mark.parametrize(
    ("space", "reply"),
    [
        (spaces.Discrete(4), "4"),
        (spaces.Discrete(4), "1 2"),
        (spaces.Discrete(4), "9" * 5000),
        (spaces.Discrete(4), "fourth"),
        (spaces.Discrete(4), "²"),
        (spaces.MultiDiscrete([3, 2]), "1"),
        (spaces.MultiDiscrete([3, 2]), "3, 0"),
        (spaces.MultiDiscrete([3, 2], dtype=np.int8), "300, 0"),
        (spaces.Text(5), "longer than five"),
    ],
)
def test_what_means_nothing(space: spaces.Space[Any], reply: str) -> None:
    with pytest.raises(ToolError, match=r"is no action\. Act by replying with"):
        space_text.parse_action(space, reply, [])


def test_observations_in_words() -> None:
    space = spaces.Dict(
        {
            "hand": spaces.Tuple([spaces.Discrete(32), spaces.Discrete(2)]),
            "speed": spaces.Box(-1, 1, (2,)),
            "flags": spaces.MultiBinary(3),
        }
    )
    value = {"flags": np.array([0, 1, 1]), "hand": (np.int64(14), 1), "speed": np.array([0.5, -0.25])}
    assert space_text.describe_observation(space, space.sample())
    assert sorted(space_text.describe_observation(space, value).splitlines()) == [
        "flags: [0, 1, 1]",
        "hand: 14, 1",
        "speed: [0.5, -0.25]",
    ]
    assert space_text.is_describable(space)
    assert not space_text.is_describable(spaces.Dict({"a": spaces.Box(0, 1, (65,))}))
    assert space_text.strip_colours("\x1b[41mS\x1b[0mF\n\x1b[0m") == "[S]F"


def test_the_family_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import anyio

    monkeypatch.setattr("agentrl.settings.registry.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'agentrl-gym\[gym\]'"):
        anyio.run(lambda: play("", **FROZEN))
    monkeypatch.undo()
    with pytest.raises(ContractError, match="needs a name"):
        EnvSpec(Gym)
