"""A run folder, open for looking."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl import UserError
from agentrl.runs import reader
from agentrl.types import Group
from agentrl.view import episode, index_cache, store
from agentrl.view.search import EpisodeSearch, list_episodes, list_groups
from agentrl.view.store import Store, open_runs
from tests.helpers import runs


def opened(folder: Path) -> Store:
    found = Store(folder)
    found.refresh()
    return found


def test_the_index_says_what_an_episode_was(tmp_path: Path) -> None:
    found = opened(runs.of(tmp_path / "run", [runs.solved(7), runs.stuck(7), runs.lost(7)])).now.table.to_pylist()
    solved, stuck, lost = found
    assert (solved["step"], solved["split"], solved["row"], solved["task"], solved["sample"]) == (1, "train", 0, 7, 0)
    assert (solved["reward"], solved["n_calls"], solved["n_errors"], solved["turns"]) == (1.0, 1, 0, 2)
    assert (stuck["stop"], stuck["n_calls"], stuck["n_errors"]) == ("max_turns", 4, 4)
    assert (lost["reward"], lost["fault"], lost["slowest"], lost["seconds"]) == (None, "tool_timeout", 30.0, 30.75)
    assert [row["opens"] for row in found] == [True, False, False]


def test_groups_are_told_apart_where_a_task_comes_twice(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    runs.write(run, 1, [Group(7, (runs.solved(7), runs.wrong(7))), Group(7, (runs.wrong(7),) * 3)])
    table = opened(tmp_path / "run").now.table
    count, found = list_groups(table, np.arange(5), 0, 9)
    assert count == 2
    assert [[m["reward"] for m in g["members"]] for g in found] == [[1.0, 0.0], [0.0, 0.0, 0.0]]


def test_one_step_is_read_alone(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step in (1, 2, 3):
        runs.write(run, step, [Group(step, (runs.solved(step), runs.wrong(step)))])
    (tmp_path / "run/trajectories/train-000003.parquet").write_bytes(b"no Parquet")
    found = Store(tmp_path / "run")
    found.read_step("train", 2)
    assert (found.now.table["step"].to_pylist(), len(found.metrics.lines)) == ([2, 2], 3)
    assert found.problems == {}  # the others were not looked at


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    found = opened(tmp_path / "run")
    assert (found.now.table.num_rows, found.metrics.lines) == (0, [])
    runs.write(run, 1, [Group(7, (runs.solved(7), runs.wrong(7)))])
    found.refresh()
    before = found.now.version
    assert (found.now.table.num_rows, len(found.metrics.lines), found.live) == (2, 1, True)
    found.refresh()
    assert found.now.version == before  # nothing new, nothing done
    run.write_summary({"steps": 1})
    assert not found.live


def test_a_run_lives_while_it_writes_and_for_three_of_its_steps(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    assert opened(tmp_path / "run").live  # nothing but its config yet

    def written(seconds_ago: float) -> Store:
        for file in (tmp_path / "run").glob("*.*"):
            os.utime(file, (time.time() - seconds_ago,) * 2)
        return opened(tmp_path / "run")

    run.log({"step": 1, "step_time": 3.0})
    assert (written(60).live, written(600).live) == (True, False)
    run.log({"step": 2, "step_time": 300.0})
    assert (written(600).live, written(1000).live) == (True, False)


def test_a_run_that_was_taken_back_is_taken_back(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    runs.write(run, 1, [Group(7, (runs.solved(7),))])
    mark = run.metrics_size()
    runs.write(run, 2, [Group(8, (runs.solved(8),))])
    found = opened(tmp_path / "run")
    run.rewind(1, mark)
    found.refresh()
    assert (found.now.table["step"].to_pylist(), found.metrics.series("reward")) == ([1], ([1], [1.0]))
    runs.write(run, 2, [Group(9, (runs.wrong(9),))])
    runs.write(run, 3, [Group(9, (runs.wrong(9),))])
    found.refresh()
    assert found.now.table["task"].to_pylist() == [7, 9, 9]
    assert found.metrics.series("reward") == ([1, 2, 3], [1.0, 0.0, 0.0])


def test_lines_that_were_taken_back_and_written_anew_between_two_looks_are_noticed(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step in (1, 2):
        run.log({"step": step, "reward": 0.25})
    found = opened(tmp_path / "run")
    run.rewind(0, 0)
    for step in (1, 2, 3):
        run.log({"step": step, "reward": 0.75})
    found.refresh()
    assert (found.metrics.series("reward"), found.metrics.generation) == (([1, 2, 3], [0.75] * 3), 1)


def test_a_line_that_is_half_written_waits(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    run.log({"step": 1, "reward": 0.5, "loss": float("nan")})
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 2, "rew')
    found = opened(tmp_path / "run")
    assert (found.metrics.series("reward"), found.metrics.series("loss")) == (([1], [0.5]), ([], []))
    assert found.metrics.unreadable == 1
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('ard": 0.75}\n')
    found.refresh()
    assert found.metrics.series("reward") == ([1, 2], [0.5, 0.75])


def test_a_damaged_file_is_told_and_hides_no_other(tmp_path: Path) -> None:
    folder = runs.of(tmp_path / "run", [runs.solved(7)])
    (folder / "trajectories/train-000002.parquet").write_bytes(b"PAR1 no")
    found = opened(folder)
    assert found.now.table.num_rows == 1
    assert list(found.problems) == ["train-000002.parquet"]
    (folder / "trajectories/train-000002.parquet").unlink()
    found.refresh()
    assert found.problems == {}


def test_columns_that_an_older_run_lacks_are_empty(tmp_path: Path) -> None:
    folder = runs.of(tmp_path / "run", [runs.solved(7)])
    path = folder / "trajectories/train-000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["advantages", "timings", "step_rewards", "fault_message"]), path)
    (row,) = opened(folder).now.table.to_pylist()
    assert (row["reward"], row["turns"], row["seconds"], row["fault_message"]) == (1.0, None, None, None)


def test_a_folder_of_schema_2_is_listed_searched_and_read_back(tmp_path: Path) -> None:
    folder = runs.of(tmp_path / "run", [runs.solved(7), runs.wrong(7)])
    path = folder / "trajectories/train-000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["info", "question", "answer", "expected"]), path)
    found = opened(folder)
    now, rows = EpisodeSearch(found).rows("question=hats")
    assert len(rows) == 0
    assert [r["question"] for r in list_episodes(now.table, EpisodeSearch(found).rows("")[1])] == [None, None]
    assert reader.build_trajectory(episode.read_episode(found, reader.parse_episode_id("1:0"))).info == {}


def test_the_index_tells_what_was_asked_answered_and_expected(tmp_path: Path) -> None:
    row, _ = opened(runs.of(tmp_path / "run", [runs.solved(7), runs.wrong(7)])).now.table.to_pylist()
    assert (row["question"], row["answer"], row["expected"]) == ("What do 7 hats cost?", "The answer is 49.", "49")
    assert reader.build_trajectory(reader.read_row(tmp_path / "run", reader.parse_episode_id("1:0"))).info == {
        "expected": "49"
    }


def test_an_index_that_was_kept_is_read_where_the_files_are_as_they_were(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step in (1, 2):
        runs.write(run, step, [Group(7, (runs.solved(7), runs.wrong(7)))])
    first = opened(tmp_path / "run")
    index_cache.write_cached_index(tmp_path / "run", first._files)
    again = index_cache.read_cached_index(tmp_path / "run", dict(first._stamp_files()))
    assert pa.concat_tables([again[n][1] for n in sorted(again)]).equals(first.now.table)
    runs.write(run, 2, [Group(9, (runs.solved(9),))])
    os.utime(tmp_path / "run/trajectories/train-000002.parquet", ns=(1, 1))
    assert opened(tmp_path / "run").now.table["task"].to_pylist() == [7, 7, 9]


@pytest.mark.parametrize("damage", [b"", b"ARROW1 no", None])
def test_an_index_that_cannot_be_read_is_made_anew(
    tmp_path: Path, damage: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = runs.of(tmp_path / "run", [runs.solved(7)])
    index = index_cache.locate_index(folder)
    assert index is not None
    index.parent.mkdir(parents=True, exist_ok=True)
    if damage is not None:
        index.write_bytes(damage)
    else:
        index.mkdir()
        first = opened(folder)
        index_cache.write_cached_index(folder, first._files)  # cannot, and says nothing
        assert not list(index.parent.glob(".*"))
    assert opened(folder).now.table.num_rows == 1


def test_runs_are_opened_by_folder_and_by_the_folder_they_are_in(tmp_path: Path) -> None:
    for name in ("a", "b"):
        runs.of(tmp_path / name, [runs.solved(7)])
    (tmp_path / "last").symlink_to("b", target_is_directory=True)
    assert [s.name for s in open_runs([str(tmp_path)])] == ["a", "b"]
    assert [s.name for s in open_runs([str(tmp_path / "last"), str(tmp_path / "b")])] == ["b"]
    with pytest.raises(UserError, match=r"no run folder '.*/lost'; did you mean 'last'\?"):
        open_runs([str(tmp_path / "lost")])
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match="is no run folder: it has no metrics"):
        open_runs([str(tmp_path / "c")])


def test_long_runs_are_read_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.start(tmp_path / "run")
    for step in range(1, 8):
        runs.write(run, step, [Group(step, (runs.solved(step),))])
    seen: list[tuple[float, list[int]]] = []
    show = Store._publish

    def told(self: Store, progress: float) -> None:
        show(self, progress)
        seen.append((round(progress, 2), self.now.table["step"].to_pylist()))

    monkeypatch.setattr(store, "BATCH", 2)
    monkeypatch.setattr(store, "SHOW_S", 0.0)
    monkeypatch.setattr(Store, "_publish", told)
    opened(tmp_path / "run")
    assert seen[1:] == [(0.29, [6, 7]), (0.57, [4, 5, 6, 7]), (0.86, [2, 3, 4, 5, 6, 7]), (1.0, [1, 2, 3, 4, 5, 6, 7])]
    assert json.dumps(seen)  # plain numbers
