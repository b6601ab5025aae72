"""A killed run goes on as if nothing had happened; what is half-written is never read."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl import Env, Reply, Step, UserError, train
from agentrl.cli import main
from agentrl.environments.curriculum import Outcome
from agentrl.models.source import locate_model
from agentrl.resources import TrainingResources
from agentrl.runs.disk import DiskNeeds
from agentrl.runs.folder import RunFolder, create_run_folder
from agentrl.training import checkpoint
from agentrl.training.callbacks import Callback
from tests.helpers.vllm_server import fake_vllm

EXACT: dict[str, Any] = {
    "steps": 4,
    "deterministic": True,
    "rollout": {"tasks_per_step": 2, "group_size": 3},
    "eval": {"every": 2, "tasks": 2, "final_tasks": 2},
    "learner": {"lr": 1e-3, "beta": 0.01},
}


class Killed(Callback):
    """Ends the run in the middle of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(next((run / "model").glob("*.safetensors"))))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the clock says."""
    return {
        k: v
        for k, v in row.items()
        if not re.match(r"(eval/)?(time/|wait/|runtime|cpu_)|clock/|tools/|tokens_per", k)
        and "seconds" not in k
        and k != "step_time"
    }


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(m, marks=pytest.mark.long if m else pytest.mark.slow)
        for m in ({}, {"lora": {"rank": 4}}, {"dtype": "bfloat16"})
    ],
)
def test_it_ends_with_the_same_weights_to_the_bit(more: dict[str, Any], tmp_path: Path) -> None:
    settings = EXACT | more
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train("math-tools", run={"dir": str(whole), "save_every": 2}, **settings)
    for at in (3, 4):  # after the checkpoint of step 2, and once more from there
        run = {"dir": str(broken), "save_every": 2, "resume": True}
        with pytest.raises(ProcessLookupError):
            train("math-tools", run=run, callbacks=[Killed(at)], **settings)
    summary = train("math-tools", run={"dir": str(broken), "save_every": 2, "resume": True}, **settings).summary
    one, other = weights(whole), weights(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [timeless(row) for row in lines(whole)] == [timeless(row) for row in lines(broken)]
    assert summary["steps"] == 4
    names = sorted(p.name for p in (whole / "trajectories").iterdir())
    assert names == sorted(p.name for p in (broken / "trajectories").iterdir())
    for name in names:
        a, b = (
            pq.read_table(run / "trajectories" / name).drop_columns(["timings", "calls"]) for run in (whole, broken)
        )
        assert a.column_names == b.column_names
        assert [n for n in a.column_names if not a[n].equals(b[n])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [pytest.param({}, marks=pytest.mark.long), {"top_p": 0.9, "min_p": 0.05}],
    ids=["all tokens", "kept sets in flight"],
)
def test_ahead_of_the_learner_no_task_is_lost_or_learned_from_twice(sampling: dict[str, Any], tmp_path: Path) -> None:
    ahead = {"tasks_per_step": 3, "group_size": 2, "max_staleness": 2, **sampling}
    settings = EXACT | {"rollout": ahead, "steps": 6, "deterministic": False}
    run = {"dir": str(tmp_path / "run"), "save_every": 1, "resume": True}
    for at in (2, 4, 5):
        with pytest.raises(ProcessLookupError):
            train("math-tools", run=run, callbacks=[Killed(at)], **settings)
    train("math-tools", run=run, **settings)
    tasks = [
        row["task"]
        for step in range(1, 7)
        for row in pq.read_table(tmp_path / "run" / "trajectories" / f"train-{step:06d}.parquet").to_pylist()
        if row["sample"] == 0
    ]
    assert len(tasks) == len(set(tasks)) == 18
    assert max(tasks) < 3 * (6 + 2 + 1)


def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    file = tmp_path / "step-000003" / "state.json"
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint.load(tmp_path) == (2, {"step": 2})
    (tmp_path / "step-000002" / "digest").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole: step-000002, step-000003 do not match"):
        checkpoint.load(tmp_path)
    assert checkpoint.load(tmp_path / "none") is None


def test_a_full_disk_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, {"step": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 2, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    said: list[str] = []

    class Listening(Callback):
        def on_message(self, text: str) -> None:
            said.append(text)

    train("math-tools", run={"dir": str(tmp_path / "run")}, callbacks=[Listening()], **EXACT | {"steps": 1})
    assert said == ["no checkpoint of step 1: No space left on device; there is none yet"] * 2  # again at the end


@pytest.mark.slow
def test_other_settings_and_another_process_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    train("math-tools", run={"dir": folder}, **EXACT | {"steps": 1})
    with pytest.raises(UserError, match=r"other settings: learner\.lr 0.001 -> 0.5; to start a new run from its model"):
        train("math-tools", run={"dir": folder, "resume": True}, **EXACT | {"learner": {"lr": 0.5, "beta": 0.01}})
    with pytest.raises(UserError, match=r"holds a run already; .* agentrl train --resume"):
        train("math-tools", run={"dir": folder}, **EXACT)
    assert main(["train", "--resume", f"{folder}x"]) == 2
    assert "--resume: there is no run in" in capsys.readouterr().err
    assert main(["train", "--resume", folder, "--steps", "2"]) == 0
    assert "going on after step 1" in capsys.readouterr().out
    lock = f"f = open({folder + '/.lock'!r}, 'a'); fcntl.flock(f, 2)"
    code = f"import fcntl, time; {lock}; print(1, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UserError, match="another process is at the run in"):
            train("math-tools", run={"dir": folder, "resume": True}, **EXACT)
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.slow
def test_a_run_resumes_with_its_servers_at_other_addresses(tmp_path: Path) -> None:
    nano = AutoModelForCausalLM.from_pretrained(locate_model("nano"))
    folder = str(tmp_path / "run")
    few: dict[str, Any] = {"rollout": {"tasks_per_step": 1, "group_size": 2, "max_tokens": 6}}
    few["eval"] = {"every": 0, "final_tasks": 1}
    with fake_vllm(nano) as before, fake_vllm(nano) as now:
        before.max_context = now.max_context = 1024
        engine = {"name": "server", "urls": [before.url]}
        train("math-tools", engine=engine, steps=1, run={"dir": folder, "save_every": 1}, **few)
        asked = len(before.asked)
        words = ["--steps", "2", "--engine", "server", "--engine.urls", now.url]
        assert main(["train", "--resume", folder, *words]) == 0
        assert (len(before.asked), bool(now.asked)) == (asked, True)
    assert now.url in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.long
def test_what_is_half_written_is_written_anew(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = EXACT | {"steps": 2}
    train("math-tools", run={"dir": str(whole), "save_every": 1}, **settings)
    run = {"dir": str(broken), "save_every": 1, "resume": True}
    with pytest.raises(ProcessLookupError):
        train("math-tools", run=run, callbacks=[Killed(2)], **settings)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (broken / name).open("a") as file:
            file.write('{"step": 2, "rew')
    (broken / "trajectories" / ".train-000002.parquet.part").write_bytes(b"PAR1")
    for folder in (".model.part", "checkpoints/.step-000002.part"):
        (broken / folder).mkdir()
        (broken / folder / "state.json").write_bytes(b"half")
    train("math-tools", run=run, **settings)
    assert [timeless(row) for row in lines(whole)] == [timeless(row) for row in lines(broken)]
    names = {str(p.relative_to(whole)) for p in whole.rglob("*")} | {"events.jsonl"}
    assert {str(p.relative_to(broken)) for p in broken.rglob("*")} == names
    assert all(json.loads(line) for line in (broken / "events.jsonl").read_text().splitlines())


def test_metrics_that_a_power_cut_has_shortened_end_with_a_line(tmp_path: Path) -> None:
    run = create_run_folder(str(tmp_path), "shop", "")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    (tmp_path / "events.jsonl").write_bytes(b'{"step": 1, "text": "a"}\n\0\0\0\n{"step": 3, "text": "b"}\n')
    assert run.last_step() == 2
    run.rewind(2, 1000)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "events.jsonl").read_text() == '{"step": 1, "text": "a"}\n'


def test_what_an_evaluation_beside_wrote_after_the_checkpoint_of_its_step_is_taken_back(tmp_path: Path) -> None:
    run = create_run_folder(str(tmp_path), "shop", "")
    run.log_message(2, "said before")
    run.log_timeline(2, "step", {"begin": 0.0})
    marks = run.log_sizes()
    run.log_message(2, "said by the evaluation")
    run.log_timeline(2, "evaluation", {"begin": 1.0})
    run.rewind(2, run.metrics_size(), marks)
    assert [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [
        "said before"
    ]
    assert [json.loads(line)["kind"] for line in (tmp_path / "timeline.jsonl").read_text().splitlines()] == ["step"]
    run.rewind(2, run.metrics_size(), {})  # neither was there yet
    assert not (tmp_path / "events.jsonl").read_bytes() + (tmp_path / "timeline.jsonl").read_bytes()


@pytest.mark.long
def test_a_finished_run_that_goes_on_keeps_its_last_evaluation_and_ends_as_one_that_was_never_finished(
    tmp_path: Path,
) -> None:
    """Its row of metrics was taken back, and nothing measured that step again."""
    settings = EXACT | {"learner": {**EXACT["learner"], "lr_scheduler": "constant"}}
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    train("math-tools", run={"dir": str(whole), "save_every": 2}, **settings)
    run = {"dir": str(longer), "save_every": 2, "resume": True}
    train("math-tools", run=run, **settings | {"steps": 2})
    first = lines(longer)
    assert [row["step"] for row in first] == [0, 1, 2, 2]
    train("math-tools", run=run, **settings | {"steps": 2})  # nothing to add: the last evaluation is made again
    assert [timeless(row) for row in lines(longer)] == [timeless(row) for row in first]
    first = lines(longer)
    with pytest.raises(ProcessLookupError):
        train("math-tools", run=run, callbacks=[Killed(3)], **settings)
    assert not (longer / "summary.json").exists()  # it has not ended any more
    train("math-tools", run=run, **settings)
    assert lines(longer)[: len(first)] == first
    assert [timeless(row) for row in lines(longer)] == [timeless(row) for row in lines(whole)]
    elapsed = [row["clock/elapsed"] for row in lines(longer)]
    assert elapsed == sorted(elapsed)
    drawn = [json.loads(line) for line in (longer / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in drawn if line["kind"] == "evaluation"] == [0, 2, 4]
    with pytest.raises(UserError, match=r"is at step 4 already: --steps 3 is before that; give 4 or more"):
        train("math-tools", run=run, **settings | {"steps": 3})


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_is_left_as_it_is(tmp_path: Path) -> None:
    run = {"dir": str(tmp_path / "run"), "save_every": 1, "resume": True}
    train("math-tools", run=run, **EXACT | {"steps": 2})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.*") if p.is_file()}
    with pytest.raises(UserError, match=r"has 2 steps and no checkpoint to resume from; nothing is deleted"):
        train("math-tools", run=run, **EXACT | {"steps": 2})
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.*") if p.is_file()}


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_anew_and_says_so(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listening(Callback):
        def on_message(self, text: str) -> None:
            heard.append(text)

    run = {"dir": str(tmp_path / "run"), "resume": True}
    with pytest.raises(ProcessLookupError):
        train("math-tools", run=run, callbacks=[Killed(1)], **EXACT | {"steps": 2})
    train("math-tools", run=run, callbacks=[Listening()], **EXACT | {"steps": 2})
    assert heard == [f"no checkpoint in {tmp_path / 'run'} yet: beginning anew"]
    assert [row["step"] for row in lines(tmp_path / "run")] == [0, 1, 2, 2]


def test_a_checkpoint_of_another_version_is_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, {"step": 3})
    (tmp_path / "step-000003" / "version").write_text("0 agentrl 0.0.9")
    with pytest.raises(
        UserError, match=r"step-000003' was written by agentrl 0\.0\.9, version 0 of checkpoints; this is agentrl .*1"
    ):
        checkpoint.load(tmp_path)
    (tmp_path / "step-000003" / "version").unlink()
    with pytest.raises(UserError, match=r"was written by an earlier agentrl, version none of checkpoints"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "digest", "version"])
def test_a_checkpoint_of_pipes_and_devices_is_not_waited_for(name: str, tmp_path: Path) -> None:
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        shutil.rmtree(tmp_path / "step-000003", ignore_errors=True)
        checkpoint.save(tmp_path, 3, {"step": 3})
        (tmp_path / "step-000003" / name).unlink()
        make(tmp_path / "step-000003" / name)
        with pytest.raises(UserError, match=r"no checkpoint in .* is whole: step-000003|version none of checkpoints"):
            checkpoint.load(tmp_path)


def test_a_checkpoint_of_holes_is_not_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, {"step": 3})
    tensors = tmp_path / "step-000003" / "tensors.safetensors"
    os.truncate(tensors, 40 << 30)
    with pytest.raises(UserError, match=r"step-000003' cannot be read: tensors.safetensors (says that it )?has 42,949"):
        checkpoint.load(tmp_path)


def test_damaged_ones_of_later_steps_do_not_push_out_those_that_are_whole(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        checkpoint.save(tmp_path, step, {"step": step})
    for step in (1_000_002, 1_000_004):
        (tmp_path / f"step-{step}").mkdir()
    assert checkpoint.load(tmp_path) == (1_000_000, {"step": 1_000_000})
    checkpoint.save(tmp_path, 1_000_001, {"step": 1_000_001})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000000", "step-1000001"]


def test_what_a_killed_process_did_not_come_to_remove_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"step": step})
    shutil.copytree(tmp_path / "step-000003", tmp_path / "step-000001")
    (tmp_path / ".step-000004.part").mkdir()
    checkpoint.prune(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]


class Odd(Env):
    """What its reset tells is for its own use."""

    tools = ()

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "2+2?", {"lock": threading.Lock()}

    async def step(self, action: Reply) -> Step:
        return Step("", random.random(), True, False, {})


def test_what_a_reset_tells_may_be_anything(tmp_path: Path) -> None:
    train(Odd, run={"dir": str(tmp_path / "run"), "save_every": 1}, **EXACT | {"steps": 1})
    found = checkpoint.load(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found[0] == 1


@pytest.mark.slow
def test_a_curriculum_goes_on_with_the_options_that_it_gave(tmp_path: Path) -> None:
    """Killed while groups are played, of whose options it hears when they end; the last step's are drawn last."""
    seen: list[list[Any]] = []

    def curriculum(history: Sequence[Outcome]) -> Mapping[str, Any]:
        seen.append([dict(o.options) for o in history])
        return {"level": len(history)}

    settings = EXACT | {"deterministic": False, "rollout": {"tasks_per_step": 2, "group_size": 2}, "steps": 4}
    run = {"dir": str(tmp_path / "run"), "save_every": 1, "resume": True}
    with pytest.raises(ProcessLookupError):
        train("math-tools", curriculum=curriculum, run=run, callbacks=[Killed(3)], **settings)
    train("math-tools", curriculum=curriculum, run=run, **settings)
    assert seen[-1] == [{"level": n} for n in (0, 0, 2, 2, 4, 4)]


@pytest.mark.parametrize(
    "more",
    [
        {"learner": {"optimizer": "adamw", "beta": 0.01}},
        *(
            pytest.param(m, marks=pytest.mark.long)
            for m in ({"learner": {"optimizer": "muon"}}, {"lora": {"rank": 4}}, {"dtype": "bfloat16"})
        ),
    ],
)
def test_the_room_that_is_asked_for_is_what_is_written(more: dict[str, Any], tmp_path: Path) -> None:
    asked: list[DiskNeeds] = []

    class Looking(Callback):
        def on_train_begin(self, session: TrainingResources, run: RunFolder) -> None:
            asked.append(checkpoint.estimate_disk_needs(session.policy.model, session.config))

    train("math-tools", run={"dir": str(tmp_path)}, callbacks=[Looking()], **EXACT | {"steps": 1, "learner": {}} | more)
    state = sum(f.stat().st_size for f in (tmp_path / "checkpoints" / "step-000001").iterdir())
    model = sum(f.stat().st_size for f in (tmp_path / "model").glob("*.safetensors"))
    assert abs(asked[0].checkpoint - state) < 0.1 * state + 2**17
    assert abs(asked[0].model - model) < 0.1 * model + 2**17


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_killed_again_and_again_it_ends_as_if_never(staleness: str) -> None:
    """SIGKILL at random moments, also while a checkpoint is written; the script says what it compares."""
    script = Path(__file__).parents[2] / "benchmarks" / "kills.py"
    words = [sys.executable, str(script), "--kills", "2", "--staleness", staleness]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("ending", ["SIGTERM", "ENOSPC later"])  # `make long ARGS=endings` ends in all ways
def test_ended_in_another_way_it_goes_on_as_if_never(ending: str) -> None:
    """By the command that its last lines name; the script says what it compares."""
    script = Path(__file__).parents[2] / "benchmarks" / "kills.py"
    words = [sys.executable, str(script), "--endings", ending]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if "not tried" in done.stdout:
        pytest.skip("needs the right to mount")
