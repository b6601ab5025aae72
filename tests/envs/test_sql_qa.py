"""sql-qa as it is played: who asks the database is right, who guesses is not."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
from agentrl_envs import sql_qa_tasks as tasks
from agentrl_envs.sql_qa import SqlQA
from agentrl_envs.sql_qa_families import FAMILIES

from agentrl import ContractError, EnvSpec, Trajectory
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, Script, ScriptedEngine, call


async def play(script: Script, numbers: range = range(12), split: str = "train", **settings: Any) -> list[Trajectory]:
    async with EnvSpec(SqlQA, **settings).open() as spec:
        groups = await Rollout(spec, ScriptedEngine(script), ByteRenderer(), split=split).batch(numbers, 1)
        assert os.listdir(spec.shared.folder) == []  # each episode takes its database with it
    return [t for g in groups for t in g]


def task_of(session: str) -> tasks._SqlTask:
    return tasks.draw(int(session.split("-")[0]), split="train")


def oracle(session: str, turn: int) -> str:
    task = task_of(session)
    return [call("schema"), call("sql", query=task.query), f"\\boxed{{{task.answer}}}"][turn]


async def test_who_asks_the_database_is_right() -> None:
    for t in await play(oracle, range(30)):
        schema, found = (m["content"] for m in t.messages if m["role"] == "tool")
        task = tasks.draw(t.task, split="train")
        assert (t.reward, t.info, t.fault) == (1.0, {"family": task.family, "expected": task.answer}, None)
        assert schema.count("CREATE TABLE") == 3
        assert found.splitlines()[1:] == [task.answer]


@pytest.mark.parametrize(
    "said", ["", "\\boxed{}", "\\boxed{0}", "\\boxed{NULL}", "\\boxed{Zoltan}", "\\boxed{self.task.answer}"]
)
async def test_who_does_nothing_is_not_paid(said: str) -> None:
    assert sum(t.reward or 0 for t in await play([said], range(20))) == 0.0


async def test_the_query_is_no_answer_and_the_database_cannot_be_changed() -> None:
    def cheat(session: str, turn: int) -> str:
        table = next(iter(task_of(session).rows))
        return [call("sql", query=f"DELETE FROM {table}"), "see above"][turn]

    for t in await play(cheat, range(6)):
        assert t.messages[3]["content"] == "error: not authorized: the database can only be read"
        assert t.reward == 0.0


async def test_the_tables_are_told_only_where_that_is_set() -> None:
    [hidden], [shown] = [await play(["x"], range(1), show_schema=show) for show in (False, True)]
    task = tasks.draw(0, split="train")
    assert hidden.messages[1]["content"] == task.question
    assert shown.messages[1]["content"] == f"{task.question}\n{task.script}"


def test_every_question_is_asked_and_has_one_answer() -> None:
    for name, family in FAMILIES.items():
        drawn = [tasks.draw(k, split="train", families=[name]) for k in range(120)]
        begun = {ask.split("{")[0] for ask, _ in family.questions}
        assert all(any(t.question.startswith(b) for t in drawn) for b in begun)
        for task in drawn:
            with closing(sqlite3.connect(":memory:")) as db:
                task.fill(db)
                assert [str(v) for (v,) in db.execute(task.query)] == [task.answer]


def test_a_seed_is_a_task_and_questions_of_train_and_test_differ() -> None:
    assert tasks.draw(3, split="train") == tasks.draw(3, split="train")
    train = {tasks.draw(k, split="train").question for k in range(400)}
    test = {tasks.draw(k, split="test").question for k in range(100)}
    assert not train & test


@pytest.mark.slow
def test_names_of_tables_differ_and_the_best_constant_answer_is_worth_little() -> None:
    drawn = [tasks.draw(k, split="test") for k in range(300)]
    assert len({t.script for t in drawn}) > 250
    assert Counter(t.answer for t in drawn).most_common(1)[0][1] / len(drawn) < 0.05


def test_the_same_question_has_other_answers_in_other_databases() -> None:
    answers: dict[str, set[str]] = {}
    for k in range(400):
        task = tasks.draw(k, split="train")
        answers.setdefault(task.question, set()).add(task.answer)
    asked_again = [a for q, a in answers.items() if len(a) > 1]
    assert len(asked_again) > 10


async def test_episodes_of_one_task_have_databases_of_their_own() -> None:
    async with EnvSpec(SqlQA).open() as spec:
        envs = [spec.make(), spec.make()]
        for env in envs:
            await env.reset(seed=1, options={"split": "train"})
        paths = {env.path for env in envs if isinstance(env, SqlQA)}
        for env in envs:
            await env.close()
    assert len(paths) == 2


async def test_wrong_settings_are_sentences() -> None:
    with pytest.raises(ContractError, match=r"env 'sql-qa': families are some of shop, school, library; not \['zoo'\]"):
        await play(["x"], families="zoo")
