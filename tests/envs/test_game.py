"""game as it is played: who thinks finds it in time, who does not does not, and what is hidden stays so."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from agentrl_envs.game import CODES, Game, _count_matches

from agentrl import ContractError, EnvSpec, Reply, Trajectory
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine

Player = Callable[[list[str]], str]  # all that was told -> the next guess


async def played(player: Player, seed: int, *, split: str = "train", **settings: Any) -> tuple[float, list[str], float]:
    """Whether it was found, all that was told, and the sum of the step rewards."""
    env = Game(**settings)
    rules, _ = await env.reset(seed=seed, options={"split": split})
    told, total = [str(rules)], 0.0
    for _ in range(env.max_turns):
        step = await env.step(Reply(player(told)))
        told.append(str(step.observation))
        total += step.reward
        if step.terminated or step.truncated:
            break
    assert step.terminated or step.truncated
    return float(env.found), told, total


def halving() -> Player:
    """Reads what was told, nothing else."""
    span: list[int] = []

    def play(told: list[str]) -> str:
        if len(told) == 1:
            span[:] = [int(n) for n in re.findall(r"\d+", told[0])[:2]]
        middle = sum(span) // 2
        if told[-1].startswith(("Higher", "Lower")):
            span[:] = [middle + 1, span[1]] if told[-1].startswith("Higher") else [span[0], middle - 1]
        return f"\\boxed{{{sum(span) // 2}}}"

    return play


def breaking() -> Player:
    """The guess among those still possible that leaves fewest at worst."""
    left, guess = list(CODES), ["1122"]

    def play(told: list[str]) -> str:
        if len(told) > 1:
            answer = tuple(int(n) for n in re.findall(r"\d+", told[-1])[:2])
            left[:] = [code for code in left if _count_matches(guess[0], code) == answer]
            guess[0] = min(left, key=_worst)
        return f"\\boxed{{{guess[0]}}}"

    def _worst(code: str) -> int:
        answers = [_count_matches(code, other) for other in left]
        return max(answers.count(a) for a in set(answers))

    return play


def at_random(kind: str) -> Player:
    rng = random.Random(0)

    def play(told: list[str]) -> str:
        low, high = (int(n) for n in re.findall(r"\d+", told[0])[:2])
        return f"\\boxed{{{rng.choice(CODES) if kind == 'code' else rng.randint(low, high)}}}"

    return play


@pytest.mark.parametrize("numbers", [2, 7, 8, 100, 1000])
async def test_halving_always_finds_the_number(numbers: int) -> None:
    for seed in range(60):
        assert (await played(halving(), seed, numbers=numbers))[0] == 1.0


@pytest.mark.parametrize("seed", range(8))
async def test_who_breaks_codes_finds_the_code(seed: int) -> None:
    assert (await played(breaking(), seed, kind="code"))[0] == 1.0


@pytest.mark.parametrize("kind", ["guess", "code"])
async def test_doing_nothing_and_guessing_blindly_is_worth_nothing(kind: str) -> None:
    nothing: list[Player] = [lambda told: "", lambda told: "\\boxed{}", lambda told: "I wait."]
    assert {(await played(p, seed, kind=kind))[0] for p in nothing for seed in range(20)} == {0.0}
    player = at_random(kind)
    found = [(await played(player, seed, kind=kind))[0] for seed in range(200)]
    assert sum(found) / len(found) < 0.03


@pytest.mark.parametrize(
    "said",
    [
        "\\boxed{" + " ".join(map(str, range(1, 9999))) + "}",
        "".join(f"\\boxed{{{n}}}" for n in range(20_000)),
        "\\boxed{self.hidden}",
        "\\boxed{1e3}",
        "\\boxed{-1}",
        "\\boxed{\u0665}",
        "\\boxed{" + "9" * 5000 + "}",
        "<think>\\boxed{5}",
    ],
)
async def test_a_bad_move_is_told_and_costs_a_turn(said: str) -> None:
    for kind in ("guess", "code"):
        found, told, _ = await played(lambda _: said, 3, kind=kind)
        assert found == 0.0
        assert all(t.startswith(("Say one", "It is from", "A code has", "Lower")) for t in told[1:])
        assert told[1].endswith(f"{len(told) - 2} turns left.")


async def test_each_seed_is_a_game_and_splits_differ() -> None:
    for kind in ("guess", "code"):
        games: dict[str, set[str | int]] = {}
        for split in ("train", "test"):
            for seed in range(200):
                one, two = Game(kind=kind), Game(kind=kind)
                assert await one.reset(seed=seed, options={"split": split}) == await two.reset(
                    seed=seed, options={"split": split}
                )
                assert one.hidden == two.hidden
                games.setdefault(split, set()).add(one.hidden if kind == "code" else one.low)
        assert not games["train"] & games["test"]


async def test_nothing_that_is_told_before_the_end_holds_the_number() -> None:
    for seed in range(50):
        env = Game()
        rules, info = await env.reset(seed=seed)
        inner = env.low + 1 if int(env.hidden) != env.low + 1 else env.low + 2
        told = [str(rules), str(info)]
        for _ in range(env.max_turns):
            step = await env.step(Reply(f"\\boxed{{{inner}}}"))
            told += [str(step.observation), "" if step.truncated else str(step.info)]
        assert step.info == {"expected": env.hidden}
        if int(env.hidden) not in (env.low, env.high):  # those two the rules name
            assert not re.search(rf"\b{env.hidden}\b", " ".join(told))


async def test_step_rewards_are_shares_of_what_was_not_known() -> None:
    for kind, player in (("guess", halving), ("code", breaking)):
        assert (await played(player(), 5, kind=kind, step_rewards=True))[2] == pytest.approx(1.0)
        assert (await played(player(), 5, kind=kind))[2] == 0.0
    assert (await played(lambda _: "x", 5, step_rewards=True))[2] == 0.0
    same = await played(lambda _: "\\boxed{1122}", 5, kind="code", step_rewards=True)
    assert 0 < same[2] < 1  # a guess said again finds out nothing


async def test_a_clone_goes_its_own_way() -> None:
    env = Game(kind="code", step_rewards=True)
    await env.reset(seed=1)
    await env.step(Reply("\\boxed{1122}"))
    twin = env.clone()
    await twin.step(Reply(f"\\boxed{{{env.hidden}}}"))
    assert (twin.found, env.found, twin.turn, env.turn) == (True, False, 2, 1)
    assert len(env.possible) > len(twin.possible) == 1


async def play(*said: str, **settings: Any) -> Trajectory:
    return await Rollout(EnvSpec(Game, **settings), ScriptedEngine(said), ByteRenderer()).episode(4)


async def test_it_is_played_through_a_rollout() -> None:
    env = Game()
    await env.reset(seed=4, options={"split": "train"})
    won = await play("\\boxed{1}", f"I say \\boxed{{{env.hidden}}}.")
    assert (won.reward, won.turns, won.stop, won.info) == (
        1.0,
        2,
        "terminated",
        {"kind": "guess", "expected": env.hidden},
    )
    lost = await play("hello")
    assert (lost.reward, lost.turns, lost.stop) == (0.0, 10, "truncated")


def test_what_is_compared() -> None:
    assert _count_matches("1122", "2211") == (0, 4)
    assert _count_matches("1234", "1243") == (2, 2)
    assert _count_matches("1111", "1222") == (1, 0)
    assert all(_count_matches(a, b) == _count_matches(b, a) for a, b in product(CODES[::97], CODES[::101]))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"numbers": 1}, "numbers is 2 to 1000000, not 1"),
        ({"kind": "chess"}, "env.kind of env 'Game': .*, not 'chess'"),
    ],
)
async def test_wrong_settings_are_sentences(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        await play("x", **settings)
