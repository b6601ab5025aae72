"""The experts of the environments that ship earn the best reward, and play in more than one way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from agentrl_envs import search_qa_tasks as tasks
from agentrl_tools.bm25_index import build_corpus
from agentrl_tools.passages import Passage

from agentrl import ContractError, EnvSpec, Trajectory
from agentrl.environments.task_sampler import task_integer
from agentrl.errors import NoExpertError
from agentrl.rollout.demonstration import Demonstration
from agentrl.rollout.expert import play_expert
from agentrl.settings.schema import RolloutConfig
from agentrl.types import JsonSchema, Message


def play(name: str, tasks: int, split: str = "train", **settings: Any) -> list[Trajectory]:
    """Play the expert on the first tasks of a split."""

    async def run() -> list[Trajectory]:
        spec = EnvSpec(name, **settings)
        async with spec.open():
            count = spec.count(split)
            numbers = [task_integer(split, i) for i in range(tasks)] if count is None else range(min(tasks, count))
            played = await play_expert(spec, numbers, RolloutConfig(), split=split)
            return [p.trajectory for p in played]

    return anyio.run(run)


def ways(trajectories: list[Trajectory]) -> set[tuple[str, ...]]:
    """Return the sequences of tools that were called."""
    return {tuple(c.name for c in t.calls) for t in trajectories}


@pytest.mark.parametrize("level", [1, 3, 4])
def test_math_tools_computes_all_at_once_or_a_part_first(level: int) -> None:
    played = play("math-tools", 200, level=level)
    assert {t.reward for t in played} == {1.0}
    assert ways(played) == {("calculator",), ("calculator", "calculator")}
    assert all(c.status == "ok" for t in played for c in t.calls)
    assert {t.reward for t in play("math-tools", 50, "test", level=level)} == {1.0}


def test_math_tools_writes_python_where_that_is_the_tool() -> None:
    played = play("math-tools", 20, tool="python", level=4)
    assert {t.reward for t in played} == {1.0}
    assert ways(played) <= {("python",), ("python", "python")}


def test_shop_looks_prices_up_together_or_one_by_one() -> None:
    played = play("shop", 100)
    assert {t.reward for t in played} == {1.0}
    turns = {(t.info["items"], t.turns) for t in played}
    assert {(3, 3), (3, 5), (1, 3)} <= turns


@pytest.mark.parametrize("hops", [[1], [2, 3]])
def test_search_qa_goes_from_page_to_page(hops: list[int]) -> None:
    played = play("search-qa", 100, hops=hops)
    assert {t.reward for t in played} == {1.0}
    assert all(sum(c.name == "search" for c in t.calls) == t.info["hops"] for t in played)
    assert {c.name for t in played for c in t.calls} == {"search", "open_page"}
    for t in played:
        read = " ".join(m["content"] for m in t.messages if m["role"] == "tool")
        assert str(t.info["expected"]) in read  # nothing is answered that was not read


def test_search_qa_has_no_expert_for_a_corpus_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada"}\n' * 3)
    corpus = tmp_path / "corpus.db"
    build_corpus([Passage("Ada", "Ada", "Ada is who.")], corpus)
    with pytest.raises(ContractError, match="the expert of env 'search-qa' knows its made-up worlds, and not"):
        play("search-qa", 1, corpus=str(corpus), questions=str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("show_schema", [False, True])
def test_sql_qa_asks_for_the_tables_and_queries(show_schema: bool) -> None:
    played = play("sql-qa", 60, show_schema=show_schema)
    assert {t.reward for t in played} == {1.0}
    assert ways(played) == {("sql",) if show_schema else ("schema", "sql")}


def test_code_writes_the_function_at_once_or_tries_it_out() -> None:
    played = play("code", 40)
    assert {t.reward for t in played} == {1.0}
    assert ways(played) == {(), ("python",)}
    assert ways(play("code", 10, tool=False)) == {()}


def test_game_finds_the_number_and_the_code_in_time() -> None:
    for numbers in (2, 3, 7, 8, 1000):
        assert {t.reward for t in play("game", 60, numbers=numbers)} == {1.0}
    opened = [t.messages[1]["content"] for t in play("game", 60, numbers=600)]
    assert len(set(opened)) > 30  # no guess is the only good one
    assert {t.reward for t in play("game:code", 100)} == {1.0}


def test_bfcl_makes_the_calls_of_the_ground_truth() -> None:
    pytest.importorskip("bfcl_eval")
    for category in ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param"):
        assert {t.reward for t in play(f"bfcl:{category}", 12)} == {1.0}


@pytest.mark.slow
def test_reasoning_gym_says_the_answer() -> None:
    pytest.importorskip("reasoning_gym")
    assert {t.reward for t in play("reasoning-gym:chain_sum", 4)} == {1.0}


def test_prompts_says_what_the_row_completes() -> None:
    rows = [{"prompt": f"{n} + 1?", "completion": rf"\boxed{{{n + 1}}}", "solution": str(n + 1)} for n in range(12)]
    assert {t.reward for t in play("prompts", 8, data=rows)} == {1.0}
    chats = [
        {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]}]}
        for r in rows
    ]
    solved = [{**chat, "solution": r["solution"]} for chat, r in zip(chats, rows, strict=True)]
    played = play("prompts", 8, data=solved, prompt_column="messages")
    assert {t.reward for t in played} == {1.0}
    assert played[0].messages[-1] == chats[played[0].task]["messages"][-1]
    bare = [{"prompt": r["prompt"], "solution": r["solution"]} for r in rows]
    with pytest.raises(NoExpertError, match=r"where each row has a `completion`.*this row has None"):
        play("prompts", 2, data=bare)


def test_a_folded_search_says_nothing_that_its_context_does_not_hold() -> None:
    """Each name that the expert writes, in a call, a summary or an answer, stands before it in the same context."""

    async def run() -> list[list[Demonstration]]:
        config = RolloutConfig(context="fold", context_budget=60)
        async with EnvSpec("search-qa").open() as spec:
            played = await play_expert(spec, range(60), config, measure=count_words)
        assert {p.trajectory.reward for p in played} == {1.0}
        return [Demonstration.list_of_expert(p) for p in played]

    def count_words(messages: Sequence[Message], tools: Sequence[JsonSchema]) -> int:
        return sum(len(m["content"].split()) for m in messages)

    folded = anyio.run(run)
    assert max(map(len, folded)) > 2
    for demonstrations in folded:
        task = tasks.draw(demonstrations[0].task, split="train")
        known = {*task.path, task.answer}
        for one in demonstrations:
            before = ""
            for message in one.messages:
                if message["role"] == "assistant":
                    said = message["content"] + json.dumps(message.get("tool_calls", []))
                    assert all(name in before for name in known if name in said)
                before += message["content"]
