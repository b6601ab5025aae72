"""TextArena's games for one player, the real package."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agentrl_envs.arena import TextArena, check_game, start_game

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


async def test_games_between_one_another_keep_their_dice_and_leave_the_worlds_alone() -> None:
    """Blackjack draws a card a move: a game played alone and one beside others draw the same."""

    async def some(moves: int, envs: list[TextArena]) -> list[list[Any]]:
        said: list[list[Any]] = [[] for _ in envs]
        for turn in range(moves):
            for env, told in zip(envs, said, strict=True):
                told.append((await env.step(Reply("[Hit]" if turn % 2 else "[Stand]"))).observation)
        return said

    def fresh(seed: str) -> TextArena:
        env = TextArena("Blackjack-v0")
        env.game, env.rng_state = start_game("Blackjack-v0", seed)
        return env

    alone = [(await some(4, [fresh(s)]))[0] for s in ("a", "b", "c")]
    random.seed(7)
    outside = random.random()
    envs = [fresh(s) for s in ("a", "b", "c")]
    random.seed(7)
    assert await some(4, envs) == alone
    assert random.random() == outside
    assert alone[0] != alone[1]


async def test_a_task_is_the_same_each_time() -> None:
    async with EnvSpec(TextArena, name="Sudoku-v0-very-easy").open() as spec:
        found = [(await spec.make().reset(seed=s, options={"split": p}))[0] for s, p in ((4, "train"),) * 2]
        others = [(await spec.make().reset(seed=s, options={"split": p}))[0] for s, p in ((5, "train"), (4, "test"))]
    assert found[0] == found[1]
    assert len({str(o) for o in (found[0], *others)}) == 3


async def test_games_that_mix_up_reason_and_reward() -> None:
    env = TextArena("ThreeCardMonte-v0")
    env.game, env.rng_state = start_game("ThreeCardMonte-v0", "x")
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
        env = TextArena(name)
        try:
            env.game, env.rng_state = start_game(name, "1")
        except ContractError:
            continue
        over = False
        for _ in range(300):
            over = over or (await env.step(Reply("nothing"))).terminated
        assert over, name
        played.add(name)
    assert len(played) >= 55
