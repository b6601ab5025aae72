"""reasoning-gym: the real package; tasks are drawn and scored in processes of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from agentrl_envs.reasoning import ReasoningGym, check_task, draw, extract_answer, score_answer

from agentrl import ContractError, EnvSpec, Trajectory
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine

factory = pytest.importorskip("reasoning_gym.factory")

TWO: dict[str, Any] = {"datasets": [{"name": n, "weight": 1.0, "config": {}} for n in ("chain_sum", "gcd")]}
QUICK = ["chain_sum", "gcd", "leg_counting", "spell_backward", "basic_arithmetic", "list_functions", "word_sorting"]
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # theirs is None
PAYS_ANYTHING = {"game_of_life_halting"}  # whatever is no "True" is taken for "False"


@pytest.fixture(autouse=True)
def _dice() -> Iterator[None]:
    """What is called here runs in another process elsewhere, and seeds its dice."""
    before = random.getstate()
    yield
    random.setstate(before)


def options_of(name: str) -> str:
    return repr(TWO if name == "composite" else {})


async def play(said: str, task: int = 3, **settings: Any) -> Trajectory:
    async with EnvSpec(ReasoningGym, **settings).open() as spec:
        return await Rollout(spec, ScriptedEngine([said]), ByteRenderer()).episode(task)


async def test_an_episode_of_the_right_and_of_no_answer() -> None:
    entry = draw("chain_sum", "{'max_terms': 4}", 3, "train")
    async with EnvSpec(ReasoningGym, name="chain_sum", config={"max_terms": 4}).open() as spec:
        for said, reward in ((f"So <answer> {entry['answer']} </answer>", 1.0), ("", 0.0), ("<answer></answer>", 0.0)):
            t = await Rollout(spec, ScriptedEngine([said]), ByteRenderer()).episode(3)
            assert (t.fault, t.reward, t.turns) == (None, reward, 1)
            assert t.messages[1]["content"] == entry["question"]


async def test_an_answer_that_cannot_be_calculated_is_wrong_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_envs.reasoning._SCORE_CPU_S", 1.0)
    t = await play("<answer>9**9**9**9**9</answer>", name="countdown")
    assert (t.fault, t.reward) == (None, 0.0)


async def test_a_machine_that_is_too_busy_to_score_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_envs.reasoning._SCORE_WALL_S", 0.0)
    t = await play("<answer>1</answer>", name="chain_sum")
    assert t.fault is not None
    assert (t.fault.kind, t.fault.message) == ("score_timeout", "the answer was not scored within 0 s")


@pytest.mark.parametrize("name", QUICK)
def test_the_right_answer_is_paid_and_none_is_not(name: str) -> None:
    entry = draw(name, "{}", 5, "train")
    assert score_answer(name, "{}", extract_answer(f"<answer>{entry['answer']}</answer>") or "", entry) == 1.0
    assert score_answer(name, "{}", "I do not know", entry) < 0.1


@pytest.mark.slow
def test_all_tasks() -> None:
    unpaid, idle = set(), {}
    for name in sorted(factory.DATASETS):
        options = options_of(name)
        entries = [draw(name, options, seed, "train") for seed in (1, 2)]
        draw.cache_clear()
        assert draw(name, options, 2, "train") == entries[1], name
        own = [score_answer(name, options, extract_answer(f"<answer>{e['answer']}</answer>") or "", e) for e in entries]
        if min(own) < 1.0:
            unpaid.add(name)
        idle[name] = max(score_answer(name, options, said, e) for e in entries for said in ("", "I do not know"))
    assert len(idle) == 106
    assert unpaid == NO_ANSWER
    assert {name for name, paid in idle.items() if paid > 0.25} == PAYS_ANYTHING
    assert sum(idle.values()) / len(idle) < 0.03  # and an answer that is not given is not scored at all


@pytest.mark.parametrize("name", ["chain_sum", "coin_flip", "gcd"])
def test_no_question_is_in_both_splits(name: str) -> None:
    train = {draw(name, "{}", seed, "train")["question"] for seed in range(200)}
    test = {draw(name, "{}", seed, "test")["question"] for seed in range(50)}
    assert not train & test


def test_too_few_tasks_to_split_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_envs.reasoning.assign_split", lambda _: "train")
    with pytest.raises(ContractError, match=r"reasoning-gym:gcd with \{\} has no task in the split 'test'"):
        draw("gcd", "{}", 99, "test")


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<answer>4</answer> no: <answer>\n5\n</answer>", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"<answer>1</answer> \boxed{2}", "1"),
        ("5", None),
        ("<answer>5", None),
    ],
)
def test_where_the_answer_is(said: str, answer: str | None) -> None:
    assert extract_answer(said) == answer


def test_a_scorer_that_raises_finds_it_wrong() -> None:
    entry = draw("prime_factorization", "{}", 1, "train")
    assert score_answer("prime_factorization", "{}", "two × three", entry) == 0.0


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("chain_sums", {}, r"reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'\?"),
        ("chain_sum", {"max_term": 3}, r"no option 'max_term'; did you mean 'max_terms'\?"),
        ("chain_sum", {"seed": 3}, "no option 'seed'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "env.config of reasoning-gym:chain_sum, .*AssertionError"),
        ("composite", {}, "Must specify at least one dataset"),
    ],
)
def test_what_is_not_there_is_a_sentence(name: str, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        check_task(name, config)


async def test_the_sentence_comes_before_the_first_episode() -> None:
    with pytest.raises(ContractError, match="did you mean 'chain_sum'"):
        await play("", name="chain_sums")
    with pytest.raises(ContractError, match="needs a name"):
        EnvSpec(ReasoningGym)


async def test_without_the_package_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.settings.registry.find_spec", lambda _: None)
    with pytest.raises(Exception, match=r"pip install 'agentrl-gym\[reasoning-gym\]'"):
        await play("", name="chain_sum")
