"""Contexts that grow out of each other: each stays what it is, and a turn touches what is new in it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl import EnvSpec, ToolEnv, tool
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.token_context import TokenContext, find_bounds, write_json
from agentrl.testing import STOP, ByteRenderer, call
from agentrl.types import Completion, SamplingParams


@pytest.mark.parametrize("seed", range(20))
def test_contexts_that_grow_out_of_each_other_are_lists_of_their_own(seed: int) -> None:
    dice = random.Random(seed)
    pairs: list[tuple[TokenContext, list[int]]] = [(TokenContext(), [])]
    for _ in range(200):
        context, wanted = pairs[dice.randrange(len(pairs))]
        what = dice.choice(["extend", "extend", "extend", "take", "copy", "write", "bounds"])
        if what == "extend":
            new = [dice.randrange(50_000) for _ in range(dice.randrange(6))]
            context.extend(tuple(new) if dice.random() < 0.5 else iter(new))
            wanted.extend(new)
        elif what == "take":
            length = dice.randrange(len(wanted) + 3)
            pairs.append((context.take(length), wanted[:length]))
        elif what == "copy":
            pairs.append((context.copy(), list(wanted)))
        elif what == "write":
            assert json.loads(context.to_json()) == wanted
        else:
            assert context.bounds == find_bounds(wanted)
    for context, wanted in pairs:
        assert list(context) == wanted == [*reversed([*reversed(context)])]
        assert context == wanted
        assert len(context) == len(wanted)
        assert json.loads(write_json(context)) == json.loads(write_json(wanted)) == wanted
        start, stop, step = (dice.choice([None, dice.randrange(-9, 9)]) for _ in range(3))
        assert context[start : stop : step or None] == wanted[start : stop : step or None]
        if wanted:
            at = dice.randrange(-len(wanted), len(wanted))
            assert context[at] == wanted[at]
        with pytest.raises(IndexError):
            context[len(wanted)]


def test_nobody_sees_what_another_one_appends() -> None:
    first = TokenContext([1, 2])
    second = first.copy()
    first.extend([3])
    second.extend([4])
    assert list(first) == [1, 2, 3]
    assert list(second) == [1, 2, 4]
    assert first.take(2) == second.take(2)
    assert repr(second) == "TokenContext([1, 2, 4])"


class Looking(ToolEnv):
    """Calls a tool as long as it may."""

    max_turns = 40

    async def reset(self, *, seed: int, options: Any = None) -> Any:
        return self.ask("Look around."), {}

    async def score(self, trajectory: Any) -> dict[str, float | None]:
        return {"turns": float(trajectory.turns)}

    @tool(timeout_s=5)
    async def look(self, place: str) -> str:
        """Look at a place."""
        return place * 20


class Reading:
    """An engine that counts how many tokens it was given that it had not seen, by the memory they are in."""

    capacity, max_context, version = 1 << 30, 1 << 20, 0

    def __init__(self) -> None:
        self.memories: dict[int, TokenContext] = {}
        self.lengths: list[int] = []

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        assert isinstance(token_ids, TokenContext)
        self.memories[id(token_ids._tokens)] = token_ids
        self.lengths.append(len(token_ids))
        ids = (*call("look", place="here").encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")

    def end_session(self, session: str) -> None: ...


async def test_an_episode_has_one_memory_of_its_tokens_and_copies_none() -> None:
    engine: Any = Reading()
    play = Rollout(EnvSpec(Looking), engine, ByteRenderer(), limits=EpisodeLimits(max_tokens=400))
    trajectory = await play.episode(0)
    assert trajectory.turns == 40
    assert engine.lengths == sorted(engine.lengths)
    [context] = engine.memories.values()
    everything = [i for s in trajectory.segments for i in s.token_ids]
    assert list(context) == everything[: len(context)]
