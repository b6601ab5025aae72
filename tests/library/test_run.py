"""A run as an object: of a training just made, of folders that were killed, damaged, or are none."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl import Run, Trajectory, UserError, evaluate, train
from agentrl.library import run as run_module
from agentrl.library.progress import PlainLines, write_line
from tests.helpers import runs

SMALL: dict[str, Any] = {
    "steps": 2,
    "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 48},
    "eval": {"every": 1, "tasks": 2, "final_tasks": 2},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train("math-tools", run={"dir": str(tmp_path_factory.mktemp("runs") / "run")}, **SMALL)


def test_the_history_has_a_row_a_step_with_the_evaluation_of_its_policy(trained: Run) -> None:
    history = trained.history
    assert list(history.index) == [0, 1, 2]
    rows = {row["step"]: row for row in trained.metrics if "eval/reward" in row}
    assert list(history["eval/reward"]) == [rows[step]["eval/reward"] for step in (0, 1, 2)]
    assert history["reward"].isna().tolist() == [True, False, False]
    assert history["total/episodes"].iloc[-1] == 8.0
    assert [e["step"] for e in trained.evaluations] == [0, 1, 2]
    assert trained.evaluations[-1]["reward"] == trained.summary["reward_after"]


def test_of_two_evaluations_of_a_step_the_history_has_that_of_its_own_policy(tmp_path: Path) -> None:
    """With ``run.load_best`` the last line of the run is an evaluation of the best policy, after the last step."""
    folder = runs.broken(tmp_path / "run", steps=2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step = lines[-1]["step"]
    lines = [*(r for r in lines if "eval/reward" not in r or r["step"] != step)]
    lines += [{"step": step, "eval/reward": 0.25}, {"step": step, "eval/reward": 0.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run(folder)
    assert run.history.loc[step, "eval/reward"] == 0.25
    assert [e["reward"] for e in run.evaluations][-2:] == [0.25, 0.75]


def test_episodes_are_the_trajectories_that_the_query_names(trained: Run) -> None:
    episodes = trained.episodes("split=train")
    assert len(episodes) == 8
    assert all(isinstance(t, Trajectory) for t in episodes)
    assert [t.task for t in episodes] == [t.task for t in (episodes[i] for i in range(8))]
    assert list(episodes[2:4]) == [episodes[2], episodes[3]]
    assert str(episodes.ids[0]) == "train-2:0"
    solved, others = trained.episodes("solved"), trained.episodes("-solved")
    assert all((t.reward or 0.0) >= 1.0 for t in solved)
    assert len(solved) + len(others) == len(trained.episodes())
    seconds = [t.timings["total"] for t in trained.episodes("split=train", sort="-seconds")]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("reward>=much", "reward is compared with a number, not 'much'"),
        ("rewards>=1", "no field 'rewards'.*did you mean 'reward'"),
        ("tool>calculator", "only = and != go with tool=calculator"),
    ],
)
def test_a_wrong_query_is_a_sentence_at_once(trained: Run, query: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        trained.episodes(query)


def test_the_report_is_a_file_and_another_file_is_not_overwritten(trained: Run, tmp_path: Path) -> None:
    assert "<h2>What stands out</h2>" in trained.report().read_text()
    assert trained.report(tmp_path / "own.html").is_file()
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(UserError, match="exists and is no report of ours"):
        trained.report(tmp_path / "notes.html")


def test_a_run_that_is_opened_again_says_the_same_and_loads_its_model(trained: Run) -> None:
    again = Run(trained.folder)
    assert (again.summary, again.metrics, repr(again)) == (trained.summary, trained.metrics, repr(trained))
    ours, theirs = trained.model.state_dict(), again.model.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert again.tokenizer.get_vocab() == trained.tokenizer.get_vocab()
    assert "\n" not in repr(again)
    assert "2 of 2 steps, held-out reward" in repr(again)
    assert "<svg" in again._repr_html_()


def test_a_link_is_followed_when_it_is_opened(trained: Run, tmp_path: Path) -> None:
    link = tmp_path / "last"
    link.symlink_to(trained.folder)
    run = Run(link)
    link.unlink()
    assert run.episodes("split=train")[0].messages
    assert run.folder == trained.folder


def test_reading_a_run_loads_no_torch(trained: Run) -> None:
    program = f"""
import sys, agentrl
run = agentrl.Run({str(trained.folder)!r})
run.history, run.summary, run.evaluations, run.report(), run._repr_html_()
list(run.episodes("split=train")), repr(run)
assert "torch" not in sys.modules, "torch"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_an_evaluation_opens_too(trained: Run, tmp_path: Path) -> None:
    measured = evaluate("math-tools", str(trained.folder), tasks=3, greedy=True, out=tmp_path / "eval")
    assert measured.folder is not None
    run = Run(measured.folder)
    assert "evaluation of 3 tasks" in repr(run)
    assert run.summary["greedy"]["reward"] == measured.reward
    assert [e["greedy_reward"] for e in run.evaluations] == [measured.reward]
    assert len(run.episodes()) == 3
    ours, theirs = trained.model.state_dict(), run.model.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_a_run_that_was_killed_has_its_steps_and_says_what_it_lacks(tmp_path: Path) -> None:
    run = Run(runs.broken(tmp_path / "run", steps=3))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # half-written
    assert list(run.history.index) == [1, 2, 3]
    assert "3 of 3 steps, not ended" in repr(run)
    with pytest.raises(UserError, match=r"has no summary: it goes on, or was killed; .*agentrl train --resume"):
        _ = run.summary
    with pytest.raises(UserError, match=r"has no model: it goes on, or was killed"):
        _ = run.model
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('ard": 1.0}\n')
    assert list(run.history.index) == [1, 2, 3, 4]


def test_damage_is_warned_of_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = runs.broken(tmp_path / "run", steps=2)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\x80\x04no json\n[1]\n")
    (folder / "trajectories" / "train-000002.parquet").write_bytes(b"PAR1 torn")
    (folder / "summary.json").write_text("[]")
    run = Run(folder)
    with pytest.warns(UserWarning, match=r"2 lines of .*metrics.jsonl cannot be read"):
        assert len(run.metrics) == 2
    with pytest.warns(UserWarning, match=r"train-000002.parquet cannot be read"):
        assert len(run.episodes()) == len(run.episodes("step=1")) == 32
    with pytest.raises(UserError, match=r"summary.json cannot be read: it is no object"):
        _ = run.summary


def test_a_run_without_a_step_is_empty(tmp_path: Path) -> None:
    runs.start(tmp_path / "run")
    run = Run(tmp_path / "run")
    assert (run.metrics, run.evaluations, list(run.episodes())) == ([], [], [])
    assert run.history.empty
    assert "0 of 40 steps, not ended" in repr(run)
    assert run._repr_html_().startswith("<div")
    with pytest.raises(UserError, match="has no step yet"):
        run.report()


def test_what_is_no_run_and_a_folder_of_several_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        Run(tmp_path / "nowhere")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is no run folder: it has no metrics\.jsonl and no trajectories"):
        Run(tmp_path / "foreign")
    for name in ("a", "b"):
        runs.start(tmp_path / "runs" / name)
    with pytest.raises(UserError, match=r"holds 2 runs; open one: .*b'"):
        Run(tmp_path / "runs")


def test_without_pandas_the_history_names_the_extra(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pandas(what: str, module: str, extra: str) -> None:
        raise UserError(f"{what} needs the package {module}: pip install 'agentrl-gym[{extra}]'")

    monkeypatch.setattr(run_module, "check_package", no_pandas)
    with pytest.raises(UserError, match=r"needs the package pandas: pip install 'agentrl-gym\[notebook\]'"):
        _ = trained.history


def test_what_others_wrote_is_escaped_in_the_page_of_a_notebook(tmp_path: Path) -> None:
    folder = runs.broken(tmp_path / "run", steps=1)
    (folder / "config.toml").write_text('model = "<script>alert(1)</script>"\nsteps = 1\n[env]\nname = "<b>"\n')
    page = Run(folder)._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_script_gets_a_line_a_step_and_nothing_if_it_is_not_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, "steps": 1, "eval": {"every": 0, "final_tasks": 1}}
    train("math-tools", run={"dir": str(tmp_path / "a")}, **settings)
    out = capsys.readouterr().out
    assert sum(line.startswith("step 1/1  reward ") for line in out.splitlines()) == 1
    assert "\x1b" not in out
    train("math-tools", run={"dir": str(tmp_path / "b")}, verbose=False, **settings)
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="verbose"):
        train("math-tools", verbose="often", **settings)  # type: ignore[arg-type]


def test_a_reader_that_has_gone_and_a_narrow_encoding_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Gone())
    PlainLines(write_line).on_message("a sentence")
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    write_line("a · b")
    assert narrow.buffer.getvalue() == b"a ? b\n"


def test_it_trains_in_a_thread_too(tmp_path: Path) -> None:
    results: list[Run] = []
    settings = {**SMALL, "steps": 1, "eval": {"every": 0, "final_tasks": 1}, "run": {"dir": str(tmp_path / "run")}}
    thread = threading.Thread(target=lambda: results.append(train("math-tools", **settings)))
    thread.start()
    thread.join()
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == results[0].summary
