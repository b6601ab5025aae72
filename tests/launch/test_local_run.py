"""A whole run by one command on this machine: a rank is killed, Ctrl-C, words that do not go together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli import launched_run
from agentrl.cli.dispatch import main
from agentrl.errors import UserError
from agentrl.launch import local_processes
from agentrl.launch.local_processes import LocalProcess, list_gpus
from agentrl.launch.run_process import RunPlan
from agentrl.runs.folder import LAUNCH_OPTIONS, spell_resume
from tests.helpers.fleet import FleetRun, find_child, kill, list_pids, read_words
from tests.helpers.processes import wait_for_end

FEW = "--rollout.tasks_per_step 2 --rollout.group_size 4 --eval.final_tasks 2 --eval.every 0 --run.save_every 1"
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
TRAIN = f"-m agentrl train --env math-tools {FEW} --ranks 2 --players 1"


def find_left(run: FleetRun) -> list[int]:
    return [pid for pid in list_pids() if str(run.folder) in read_words(pid, "cmdline")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FleetRun]:
    started = FleetRun([*TRAIN.split(), "--steps", "1000"], tmp_path)
    yield started
    started.process.kill()
    for pid in find_left(started):
        wait_for_end(pid)


@pytest.mark.slow
@on_linux
def test_killed_ranks_and_players_are_started_again_and_ctrl_c_ends_all(run: FleetRun) -> None:
    run.wait_for_steps(2)
    kill(find_child(run.find_rank(0), "player"))
    run.wait_for_text("of the run ended with status -9; another one is started")
    kill(run.find_rank(1))
    run.wait_for_text("(1 of 3 restarts)")
    run.wait_for_text("going on after step")
    run.wait_for_steps(run.count_steps() + 2)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(300) == 130, run.read_log()
    assert "Ctrl-C: finishing this step, then saving a checkpoint and the model" in run.read_log()
    assert (run.folder / "summary.json").exists()
    assert not find_left(run)


@pytest.mark.slow
@on_linux
def test_it_ends_with_the_command_that_is_killed(run: FleetRun) -> None:
    run.wait_for_steps(1)
    left = [*find_left(run), find_child(run.find_rank(0), "player")]
    assert len(left) == 4  # the command, two ranks, a player
    run.process.kill()
    run.process.wait()
    for pid in left:
        wait_for_end(pid)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--max_restarts", "2"],
            "--max_restarts is for what a launcher starts, and nothing does: --launcher, --ranks",
        ),
        (["--ranks", "2", "--serve.tp", "2"], "--serve is of the servers that --servers starts, and there are none"),
        (
            ["--servers", "2", "--engine", "vllm"],
            "--servers 2 starts the servers that the run samples from: leave out engine.name, which is 'vllm'",
        ),
        (["--servers", "1", "--engine", "server", "--engine.urls", "http://a:1"], "leave out engine.urls"),
        (
            ["--servers", "1", "--serve.port", "7"],
            "--serve.port is the run's own, or the launcher's choice: leave it out",
        ),
        (["--servers", "1", "--serve.tpp", "2"], "tpp: unknown setting; did you mean 'tp'? [command line]"),
        (["--servers", "1", "--serve.tp", "no"], "--tp: input should be a valid integer"),
        (["--require_gpus"], "--require_gpus is for what a launcher starts, and nothing does: --launcher, --ranks"),
        (["--launcher", "rya"], "no run launcher 'rya'; did you mean 'ray'?"),
        (["--ranks", "0"], "--ranks: input should be greater than or equal to 1"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--env", "math-tools", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_it_is_not_started_by_torchrun_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", "--env", "math-tools", "--launcher", "local"]) == 2
    assert (
        "--launcher local starts the learner's processes itself, and this is one of 4 that" in capsys.readouterr().err
    )


def test_the_plan_is_the_command_line_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[RunPlan] = []

    def supervise(plan: RunPlan, *_others: object) -> int:
        plans.append(plan)
        return 7

    monkeypatch.setattr(launched_run, "supervise", supervise)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('env = "math-tools"\nmodel = "nano"\n')
    words = "--servers 2 --serve.tp 2 --serve.dp=3 --serve.vllm.enforce_eager --ranks 4 --players 5 --cpus 0.5 --seed 3"
    assert main(["train", "run.toml", *words.split(), "--lora.rank", "8"]) == 7
    (plan,) = plans
    *own, run_dir, folder = plan.arguments
    assert own == ["train", "run.toml", "--players=5", "--seed=3", "--lora.rank=8"]
    assert (run_dir, Path(folder).parent) == ("--run.dir", tmp_path / "runs")
    serving = "serve --model nano --dtype float32 --max_num_seqs 128 --lora_rank 8 --tp 2 --dp 3"
    assert plan.serve_arguments == (*serving.split(), "--vllm.enforce_eager", "true")
    assert plan.list_names() == ["rank 0", "rank 1", "rank 2", "rank 3", "server 1", "server 2"]
    assert plan.list_gpus() == [1, 1, 1, 1, 6, 6]
    assert (plan.players, plan.cpus, plan.folder) == (5, 0.5, str(tmp_path))
    assert plan.given["lora.rank"] == 8
    assert "players.host" not in plan.given


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """The plans of the runs that would be started."""
    made: list[RunPlan] = []

    def supervise(plan: RunPlan, *_others: object) -> int:
        made.append(plan)
        return 0

    monkeypatch.setattr(launched_run, "supervise", supervise)
    return made


def test_a_run_that_resumes_is_named_by_its_own_path_and_not_by_a_link(plans: list[RunPlan], tmp_path: Path) -> None:
    """Another run may move the link before the ranks are started again."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text('env = "math-tools"\nmodel = "nano"\n')
    last = tmp_path / "last"
    last.symlink_to("one", target_is_directory=True)
    assert main(["train", "--resume", str(last), "--ranks", "2"]) == 0
    last.unlink()
    last.symlink_to("two", target_is_directory=True)
    assert plans[0].arguments == ("train", "--resume", str(tmp_path / "one"))


def test_batches_of_other_libraries_are_read_for_the_ranks_and_told_by_the_first(
    plans: list[RunPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    words = ["--per_device_train_batch_size", "2", "--num_generations", "4"]  # one of one rank is refused
    assert main(["train", "--env", "math-tools", "--ranks", "2", *words]) == 0
    assert dict(os.environ) == before
    assert capsys.readouterr().err == ""
    assert plans[0].arguments[2:4] == ("--per_device_train_batch_size=2", "--num_generations=4")
    assert main(["train", "--env", "math-tools", *words]) == 2


def test_the_sentence_that_says_how_to_resume_has_the_launchers_options(
    plans: list[RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--ranks", "2", "--servers", "1", "--serve.vllm.enforce_eager", "true"]
    assert main(["train", "--env", "math-tools", *words]) == 0
    assert plans[0].options == tuple(words)
    monkeypatch.delenv(LAUNCH_OPTIONS, raising=False)
    assert spell_resume("runs/x") == "agentrl train --resume runs/x"
    monkeypatch.setenv(LAUNCH_OPTIONS, "--ranks 2")
    assert spell_resume("runs/x") == "agentrl train --ranks 2 --resume runs/x"


@pytest.mark.parametrize(("line", "typed"), [("ranks = 2", "--ranks 2"), ('launcher = "ray"', "--launcher ray")])
def test_an_option_of_the_command_in_a_file_is_refused_with_how_it_is_given(
    tmp_path: Path, line: str, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(line)
    assert main(["train", str(tmp_path / "run.toml"), "--env", "math-tools"]) == 2
    name = line.partition(" ")[0]
    assert f"{name}: an option of agentrl train, and no setting of a run: {typed} on the" in capsys.readouterr().err


def test_servers_of_a_run_that_resumes_need_no_trust_in_the_addresses_of_earlier_ones(
    plans: list[RunPlan], tmp_path: Path
) -> None:
    text = 'env = "math-tools"\nmodel = "nano"\nengine = {name = "server", urls = ["http://10.9.9.9:1"]}\n'
    (tmp_path / "config.toml").write_text(text)
    assert main(["train", "--resume", str(tmp_path), "--servers", "1"]) == 0
    assert plans[0].servers == 1


def test_output_that_comes_in_parts_is_shown_whole(capfd: pytest.CaptureFixture[str]) -> None:
    first, other = launched_run._relay("rank 0"), launched_run._relay("server 1")
    for byte in "naïve 日本\n".encode():
        first("out", bytes([byte]))
        other("err", bytes([byte]))
    other("err", b"a\r")
    other("out", b"between")
    other("err", b"\nb\rc\r\n")
    other("out", b" lines\n" + b"x" * (1 << 17))
    shown, said = capfd.readouterr()
    assert shown == "naïve 日本\n"
    *lines, longest = said.splitlines()
    assert lines == [f"[server 1] {text}" for text in ("naïve 日本", "a", "b", "c", "between lines")]
    assert longest == f"[server 1] {'x' * (1 << 17)}"


def test_gpus_are_those_that_the_environment_shows() -> None:
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "2, 5,GPU-1"}) == ["2", "5", "GPU-1"]
    assert list_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.anyio
async def test_each_process_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_processes, "list_gpus", lambda: ["0", "1", "2", "3", "4"])
    plan = RunPlan(("train",), ranks=1, servers=2, server_gpus=2)
    async with local_processes.place_locally(plan) as placement:
        own = [p._variables["CUDA_VISIBLE_DEVICES"] for p in placement.processes if isinstance(p, LocalProcess)]
    assert own == ["0", "1,2", "3,4"]
    with pytest.raises(UserError, match="--launcher local: the run asks for 7 GPUs, and there is 5: give fewer"):
        async with local_processes.place_locally(replace(plan, servers=3)):
            pass
    monkeypatch.setattr(local_processes, "list_gpus", list)
    with pytest.raises(UserError, match="--launcher local: the run asks for 5 GPUs, and there is none: give fewer"):
        async with local_processes.place_locally(replace(plan, require_gpus=True)):
            pass
