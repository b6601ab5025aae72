"""search-qa as it is played: who looks things up is right, who guesses is not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs import search_qa_tasks as tasks
from agentrl_envs.nano import path as nano
from agentrl_envs.search_qa import SearchQA
from agentrl_tools.bm25_index import build_corpus
from agentrl_tools.passages import Passage

from agentrl import ContractError, EnvSpec, Trajectory, UserError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, Script, ScriptedEngine, call
from agentrl.types import Group


async def play(script: Script, numbers: range = range(12), split: str = "train", **settings: Any) -> list[Trajectory]:
    async with EnvSpec(SearchQA, **settings).open() as spec:
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer(), split=split)
        groups: list[Group] = await rollout.batch(numbers, 1)
    return [t for g in groups for t in g]


def oracle(session: str, turn: int, split: str = "test") -> str:
    """Searches for each name on the way, then says what stands on the last page."""
    task = tasks.draw(int(session.split("-")[0]), split=split)  # type: ignore[arg-type]
    return call("search", query=task.path[turn]) if turn < len(task.path) else f"\\boxed{{{task.answer}}}"


async def test_who_looks_it_up_is_right_and_each_page_leads_to_the_next() -> None:
    for t in await play(oracle, range(30), "test"):
        task = tasks.draw(t.task, split="test")
        told = [m["content"] for m in t.messages if m["role"] == "tool"]
        assert (t.reward, t.info) == (1.0, {"hops": len(task.path), "expected": task.answer})
        for found, wanted in zip(told, [*task.path[1:], task.answer], strict=True):
            assert wanted in found


async def test_the_first_search_does_not_hold_the_answer_of_a_longer_question() -> None:
    """Nor does one for all that the question says."""
    both = await play(lambda s, turn: call("search", query=_question(s)) if turn == 0 else "x", range(100), hops=[2, 3])
    held = [t for t in both if tasks.draw(t.task, split="train", hops=(2, 3)).answer in t.messages[3]["content"]]
    assert len(held) / len(both) < 0.05


def _question(session: str) -> str:
    return tasks.draw(int(session.split("-")[0]), split="train", hops=(2, 3)).question


@pytest.mark.parametrize(
    "said",
    [
        "",
        "\\boxed{}",
        "\\boxed{the}",
        "\\boxed{.*}",
        "I do not know.",
        "\\boxed{" + " ".join(tasks._build_half(0, "train")) + "}",
    ],
)
async def test_who_does_nothing_is_not_paid(said: str) -> None:
    assert {t.reward for t in await play([said])} == {0.0}


@pytest.mark.slow
async def test_saying_what_the_first_search_shows_is_worth_little() -> None:
    found: list[float | None] = []
    for t in await play(lambda s, turn: call("search", query=_question(s)), range(60), hops=[2, 3]):
        shown = t.messages[3]["content"]
        guess = shown.split()[-1].strip(".")
        found.append(float(guess == tasks.draw(t.task, split="train", hops=(2, 3)).answer))
    assert sum(f or 0 for f in found) / len(found) < 0.05


def test_the_best_constant_answer_is_worth_little() -> None:
    for hops in ((1,), (2,), (3,)):
        answers = Counter(tasks.draw(k, split="test", hops=hops).answer for k in range(1000))
        assert answers.most_common(1)[0][1] / 1000 < 0.05


def test_a_seed_is_a_question_and_the_halves_know_nothing_of_each_other() -> None:
    assert tasks.draw(3, split="train") == tasks.draw(3, split="train")
    train, test = tasks._build_half(0, "train"), tasks._build_half(0, "test")
    assert not train.keys() & test.keys()
    for thing in train.values():
        assert not set(thing.facts.values()) & test.keys()
    assert tasks._build_half(0, "train") != tasks._build_half(1, "train")
    assert [*tasks.SearchWorld(4)] == [*tasks.SearchWorld(4)] != [*tasks.SearchWorld(5)]


def test_a_larger_world_has_more_of_everything_and_halves_that_share_nothing() -> None:
    train, test = tasks._build_half(0, "train", 3), tasks._build_half(0, "test", 3)
    assert len(train) == len(test) == 3 * len(tasks._build_half(0, "train"))
    assert not train.keys() & test.keys()
    assert len([*tasks.SearchWorld(0, 3)]) == 6 * sum(tasks.SIZES.values())
    assert tasks.draw(3, split="test", size=3).path[0] in test


async def test_questions_of_a_larger_world_are_looked_up_in_it() -> None:
    def look_up(session: str, turn: int) -> str:
        task = tasks.draw(int(session.split("-")[0]), split="train", size=2)
        return call("search", query=task.path[turn]) if turn < len(task.path) else f"\\boxed{{{task.answer}}}"

    assert {t.reward for t in await play(look_up, size=2)} == {1.0}


def test_what_is_left_to_ask_begins_at_the_page_that_comes_next() -> None:
    for seed in range(200):
        task = tasks.draw(seed, split="train")
        for at, question in enumerate(task.questions):
            assert [name in question for name in task.path] == [i == at for i in range(len(task.path))]


def test_the_answer_stands_on_the_last_page_only() -> None:
    for seed in range(500):
        task = tasks.draw(seed, split="train")
        pages = [tasks._build_half(0, "train")[name].page.text for name in task.path]
        assert [task.answer in page for page in pages] == [False] * (len(pages) - 1) + [True]
        assert task.path[0] in task.question
        assert not any(name in task.question for name in (*task.path[1:], task.answer))


def test_a_capital_is_in_its_country() -> None:
    things = tasks._build_half(0, "train")
    assert all(things[t.facts["capital"]].facts["country"] == t.name for t in things.values() if t.kind == "country")


async def test_a_played_episode_fits_into_the_embedded_policy() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(nano())
    async with EnvSpec(SearchQA).open() as spec:
        schemas = [t.schema for t in spec.make().tool_list]
    for t in await play(oracle, range(8), "test"):
        prompt = tokenizer.apply_chat_template(list(t.messages), tools=schemas, tokenize=True, return_dict=False)
        assert len(prompt) < 900


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    build_corpus([Passage("Ilm", "Ilm", "The Ilm is 128 km long.")], tmp_path / "c.db")
    rows = [{"question": f"How long is it? ({n})", "answer": ["128 km", 128]} for n in range(9)]
    rows.append({"question": "Which river?", "answer": "The Ilm"})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"corpus": str(tmp_path / "c.db"), "questions": str(tmp_path / "q.jsonl")}


async def test_ones_own_corpus_and_questions(own: dict[str, Any]) -> None:
    train = await play([call("search", query="Ilm"), "\\boxed{128 km}"], range(4), **own)
    assert [t.messages[3]["content"] for t in train] == ["1. Ilm: The Ilm is 128 km long."] * 4
    assert [t.reward for t in train] == [1.0] * 4
    assert {t.reward for t in await play(["\\boxed{128.0}"], range(4), **own)} == {1.0}
    assert {t.reward for t in await play(["\\boxed{ilm.}"], range(4), "test", **own)} == {1.0}
    assert {t.reward for t in await play(["\\boxed{Ilm Saale}"], range(4), "test", **own)} == {0.0}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "a"}, "row 1: there is no 'answer'"),
        ({"question": 5, "answer": "a"}, "row 1: a question is a text"),
        ({"question": "a", "answer": []}, "row 1: a question is a text, and has an answer"),
        ({"question": "a", "answer": [None]}, "row 1: an answer is a text or a number"),
    ],
)
async def test_wrong_questions_are_sentences(
    own: dict[str, Any], tmp_path: Path, row: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "wrong.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=sentence):
        await play(["x"], **{**own, "questions": str(tmp_path / "wrong.jsonl")})


async def test_wrong_settings_are_sentences(own: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="corpus and questions go together"):
        await play(["x"], corpus=own["corpus"])
    with pytest.raises(ContractError, match=r"hops are some of 1, 2, 3; not \[4\]"):
        await play(["x"], hops=[4])
    for size in (0, 21):
        with pytest.raises(ContractError, match=f"size is 1 to 20, not {size}"):
            await play(["x"], size=size)
