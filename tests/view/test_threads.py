"""The threads of an agent's episode, as the page and `agentrl explain` tell of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.credit import record_held_out
from agentrl.runs import reader
from agentrl.runs.reader import parse_episode_id
from agentrl.types import CallRecord, Group, Message, Segment, Stop, Thread, ThreadRole, Trajectory
from agentrl.view import episode
from agentrl.view.explain import explain_episode, explain_token
from agentrl.view.store import Store
from agentrl.view.thread_tree import describe_tree
from agentrl.view.tokens import TokenTexts
from tests.helpers import runs


def said(*texts: str) -> tuple[Message, ...]:
    """Make messages: ``a:`` begins an assistant's, others are a user's."""
    return tuple(
        {"role": "assistant" if t.startswith("a:") else "user", "content": t.removeprefix("a:")} for t in texts
    )


def model(*ids: int) -> Segment:
    return Segment("model", ids, (-0.5,) * len(ids), (0,) * len(ids))


def agents_episode() -> Trajectory:
    """A main thread, its helper, a title, and the main one folded: turns 0 and 3; 1; 2; 4."""
    main = said("task", "a:ask", "told", "a:hm")
    folded = said("task", "known", "a:right")
    threads = (
        Thread(ThreadRole.MAIN, None, None, (0, 3), 0, main),
        Thread(ThreadRole.SUB_AGENT, 0, 0, (1,), 0, said("help", "a:done")),
        Thread(ThreadRole.SIDE_CALL, 0, 0, (2,), 0, said("title", "a:a title")),
        Thread(ThreadRole.COMPACTION, 0, 3, (4,), 1, folded),
    )
    segments = (
        *(Segment("prompt", (1,)), model(2, 3), Segment("env", (4,)), model(5)),
        *(Segment("prompt", (6,)), model(7)),
        Segment("prompt", (8, 9)),
        *(Segment("prompt", (10,)), model(11)),
    )
    calls = (CallRecord(1, "add", "ok", 0.1), CallRecord(3, "add", "tool", 0.1))
    return Trajectory(7, segments, folded, Stop.TERMINATED, {"right": 1.0}, calls=calls, threads=threads)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    run = runs.start(tmp_path / "run")
    runs.write(run, 1, [Group(7, (agents_episode(), runs.wrong(7)))])
    made = Store(tmp_path / "run")
    made.refresh()
    return made


def read(store: Store) -> Any:
    return episode.read_episode(store, parse_episode_id("1:0"))


def test_threads_come_back_as_they_were(store: Store) -> None:
    row = reader.read_row(store.folder, parse_episode_id("1:0"))
    assert reader.build_trajectory(row).threads == agents_episode().threads
    assert [len(t["messages"]) for t in row["threads"]] == [len(t["messages"]) for t in row["threads"]]
    assert (
        row["threads"][3]["messages"]
        == '[{"role": "user", "content": "known"}, {"role": "assistant", "content": "right"}]'
    )
    assert row["question"] == "task"
    assert reader.build_trajectory(reader.read_row(store.folder, parse_episode_id("1:1"))).threads == ()


def test_a_file_of_the_version_before_has_none(tmp_path: Path, store: Store) -> None:
    path = store.folder / "trajectories" / "train-000001.parquet"
    older = pq.read_table(path).drop_columns(["threads"]).replace_schema_metadata({"agentrl_trajectories": "6"})
    pq.write_table(older, path)
    row = reader.read_row(store.folder, parse_episode_id("1:0"))
    assert reader.build_trajectory(row).threads == ()
    assert describe_tree(read(store)) == []
    assert len(read(store)["segments"]) == 9


def test_damaged_threads_leave_the_conversation(store: Store) -> None:
    path = store.folder / "trajectories" / "train-000001.parquet"
    table = pq.read_table(path)
    rows = table["threads"].to_pylist()
    rows[0][1]["parent"] = 3
    at = table.schema.get_field_index("threads")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(rows, table.schema.field(at).type)), path)
    assert describe_tree(read(store)) == []
    assert [m["text"] for m in episode.describe_messages(read(store))] == ["task", "known", "right"]


def test_each_thread_is_described_by_what_it_adds(store: Store) -> None:
    main, helper, title, folded = describe_tree(read(store))
    assert [t["name"] for t in (main, helper, title, folded)] == ["main", "sub-agent", "side call", "compaction"]
    assert [m.get("turn") for m in main["messages"]] == [None, 0, None, 3]
    assert [m["text"] for m in folded["messages"]] == ["known", "right"]
    assert (folded["shared"], folded["begun"], folded["messages"][1]["turn"]) == (1, 1, 4)
    assert [m["number"] for m in folded["messages"]] == [1, 2]
    assert [(t["tokens"], t["sampled"]) for t in (main, helper, title, folded)] == [(5, 3), (2, 1), (2, None), (2, 1)]
    assert title["trained"] is False
    assert episode.find_text(read(store), 1, None, 1) == "done"
    assert [m.get("turn") for m in episode.describe_messages(read(store))] == [None, None, 4]


def test_a_token_is_told_its_thread_and_where_that_comes_from(store: Store) -> None:
    texts = TokenTexts(store)

    def explain(number: int) -> str:
        return "\n".join(explain_token(store, texts, "1:0", number))

    assert "in thread 1 of 4, main: the episode's first conversation" in explain(1)
    assert "written by the model, in turn 4, by version 0" in explain(4)
    helper = explain(6)
    assert "in thread 2 of 4, sub-agent: a conversation of its own, opened by thread 1 (main) behind turn 1" in helper
    assert "in turn 2, by version 0" in helper
    folded = explain(10)
    assert "in thread 4 of 4, compaction: goes on for thread 1 (main) behind turn 4, with a shorter history" in folded
    assert "in turn 5" in folded
    assert "its thread begins with it: the history, which is trained elsewhere" in explain(9)


def test_a_side_call_is_told_why_it_was_not_trained(store: Store) -> None:
    lines = explain_token(store, TokenTexts(store), "1:0", 8)
    assert lines[1] == "a side call's: its prompt, and what the model answered"
    assert lines[2] == "in thread 3 of 4, side call: one turn on its own, beside thread 1 (main) behind turn 1"
    assert lines[3].startswith("not trained: a side call is seen and not learned from")
    told = explain_episode(store, "1:0")
    assert any(line.startswith("thread 3 of 4, side call") and line.endswith("; not trained") for line in told)
    assert "in 4 turns of 4 threads, which count as one episode" in "\n".join(told)
    assert [line[:6] for line in told if ": add " in line] == ["turn 4", "turn 5"]


def test_threads_of_an_evaluation_are_stored_too(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    run.write_trajectories(0, record_held_out([Group(7, (agents_episode(),))]), "test")
    row = reader.read_row(run.folder, parse_episode_id("test-0:0"))
    assert len(row["threads"]) == 4
