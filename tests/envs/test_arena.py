"""TextArena's games for one player, the real package."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agentrl_envs import arena
from agentrl_envs.arena import TextArena, check_game, play_game

from agentrl import ContractError, EnvSpec, Reply, Trajectory
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, decode_text

pytest.importorskip("textarena")

GUESSING, HANOI = "GuessTheNumber-v0", "TowerOfHanoi-v0"


@pytest.fixture(autouse=True)
def _dice() -> Iterator[None]:
    before = random.getstate()
    yield
    random.setstate(before)


async def play(name: str, player: Callable[[str, int], str], tasks: int = 3) -> list[Trajectory]:
    """``player`` is given the text so far, and the turn."""
    engine = ScriptedEngine(lambda _, turn: player(decode_text(engine.contexts[-1]), turn))
    async with EnvSpec(TextArena, name=name).open() as spec:
        rollout = Rollout(spec, engine, ByteRenderer())
        return [await rollout.episode(task) for task in range(tasks)]


def halving(seen: str, turn: int) -> str:
    guesses = [int(n) for n in re.findall(r"I say \[(\d+)\]", seen)]
    low, high = 1, 20
    for guess, hint in zip(guesses, re.findall(r"number is (higher|lower)", seen), strict=True):
        low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
    return f"I say [{(low + high) // 2}]"


def hanoi(disks: int, source: str = "A", target: str = "C", spare: str = "B") -> list[str]:
    if disks == 0:
        return []
    return [*hanoi(disks - 1, source, spare, target), f"{source} {target}", *hanoi(disks - 1, spare, target, source)]


async def test_who_knows_the_game_wins_it() -> None:
    played = await play(GUESSING, halving)
    assert [(t.fault, t.reward, t.stop) for t in played] == [(None, 1.0, "terminated")] * 3
    assert max(t.turns for t in played) > 1
    moves = hanoi(3)
    played = await play(HANOI, lambda _, turn: moves[turn], tasks=1)  # the brackets are put around
    assert (played[0].reward, played[0].turns, played[0].info["reason"][:16]) == (1.0, 7, "Congratulations!")


@pytest.mark.parametrize("name", [GUESSING, HANOI])
async def test_who_does_nothing_gets_nothing(name: str) -> None:
    (played,) = await play(name, lambda *_: "", tasks=1)
    assert (played.fault, played.reward, played.turns) == (None, 0.0, 2)  # one bad move is forgiven
    assert "You attempted an invalid move" in played.messages[2]["content"]
    assert played.messages[-1]["content"].startswith("Invalid Move:")


def begin(name: str, seed: str = "1") -> TextArena:
    env = TextArena(name)
    env.seed = seed
    return env


async def test_games_between_one_another_keep_their_dice() -> None:
    """Blackjack draws a card a move: a game played alone and one beside others draw the same."""

    async def some(moves: int, envs: list[TextArena]) -> list[list[Any]]:
        said: list[list[Any]] = [[] for _ in envs]
        for turn in range(moves):
            for env, told in zip(envs, said, strict=True):
                told.append((await env.step(Reply("[Hit]" if turn % 2 else "[Stand]"))).observation)
        return said

    alone = [(await some(4, [begin("Blackjack-v0", s)]))[0] for s in ("a", "b", "c")]
    assert await some(4, [begin("Blackjack-v0", s) for s in ("a", "b", "c")]) == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("name", ["Blackjack-v0", "Minesweeper-v0", "Sokoban-v0"])
def test_a_game_that_no_worker_has_kept_is_played_again_to_the_same_place(name: str) -> None:
    moves = ["[Hit]", "[word]", "[1 1]", "[up]"]
    kept = [play_game(name, "s", moves[:n]) for n in range(5)]
    over = next((n for n, position in enumerate(kept) if position.over), 4)
    arena._games.clear()
    arena._start.cache_clear()
    assert play_game(name, "s", moves[:over]) == kept[over]


async def test_a_branch_goes_on_by_itself() -> None:
    env = begin(HANOI)
    await env.step(Reply("A C"))
    branch = copy.copy(env)
    assert (await env.step(Reply("A B"))).observation == (await branch.step(Reply("A B"))).observation
    assert (await branch.step(Reply("C B"))).observation != (await env.step(Reply("B A"))).observation


async def test_a_task_is_the_same_each_time() -> None:
    async with EnvSpec(TextArena, name="Sudoku-v0-very-easy").open() as spec:
        found = [(await spec.make().reset(seed=s, options={"split": p}))[0] for s, p in ((4, "train"),) * 2]
        others = [(await spec.make().reset(seed=s, options={"split": p}))[0] for s, p in ((5, "train"), (4, "test"))]
    assert found[0] == found[1]
    assert len({str(o) for o in (found[0], *others)}) == 3


async def test_games_that_mix_up_reason_and_reward() -> None:
    env = begin("ThreeCardMonte-v0", "x")
    await env.step(Reply("nonsense"))
    step = await env.step(Reply("nonsense"))
    assert (step.terminated, step.reward, step.observation) == (True, 0.0, "Invalid Move: Bad action. Use `[k]`.")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("GuessTheNumbers-v0", r"textarena has no game 'GuessTheNumbers-v0'; did you mean 'GuessTheNumber-v0'\?"),
        ("TicTacToe-v0", "textarena:TicTacToe-v0 is for more than one player"),
        ("QuantumTicTacToe-v0", "is for more than one player, .*it begins with a TwoPlayerState"),
        ("TwentyQuestions-v0", "textarena:TwentyQuestions-v0 cannot be played here: OpenRouter API key not found"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_reason(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ContractError, match=sentence):
        check_game(name)


async def test_the_sentence_comes_before_the_first_episode() -> None:
    with pytest.raises(ContractError, match="is for more than one player"):
        await play("TicTacToe-v0", lambda *_: "")


@pytest.mark.slow
async def test_all_games_for_one_begin_go_on_and_end() -> None:
    from textarena.envs.registration import ENV_REGISTRY

    played, slow = set(), {"Sudoku-v0-hard", "Sokoban-v0-medium"}  # to make one may take any time
    for name in sorted({k for k in ENV_REGISTRY if not k.endswith(("-raw", "-train"))} - slow):
        env = begin(name)
        try:
            play_game(name, "1", ())
        except ContractError:
            continue
        over = False
        for _ in range(300):
            over = over or (await env.step(Reply("nothing"))).terminated
        assert over, name
        played.add(name)
    assert len(played) >= 55
