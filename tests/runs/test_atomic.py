"""A run's folder: files that are whole or not there, one process at a time, what the disk refuses as a sentence."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import UserError, train
from agentrl.cli import main
from agentrl.runs.atomic import FolderLock, raise_write_errors, replace_atomically
from agentrl.runs.folder import create_run_folder
from agentrl.training.callbacks import Callback

EXACT: dict[str, Any] = {
    "steps": 3,
    "deterministic": True,
    "rollout": {"tasks_per_step": 2, "group_size": 2},
    "eval": {"every": 0, "final_tasks": 2},
    "learner": {"lr": 1e-3},
}


def limit(size: int) -> None:
    """No file may grow over it, in bytes: the system itself refuses the write, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def limited() -> Iterator[None]:
    """The limit ends with the test, before pytest itself writes what came of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def disk(path: Path, options: str) -> Iterator[Path]:
    """A disk of its own, where one can be had."""
    path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@limited()
def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("before")

    def write(size: int) -> None:
        with replace_atomically(file) as aside:
            aside.write_text("x" * size)

    limit(100)
    with pytest.raises(OSError, match="File too large"):
        write(101)
    assert file.read_text() == "before"
    write(100)
    assert file.read_text() == "x" * 100
    assert [p.name for p in tmp_path.iterdir()] == ["a.toml"]


@limited()
def test_what_the_disk_refuses_is_a_sentence(tmp_path: Path) -> None:
    limit(10)
    with pytest.raises(UserError) as told, raise_write_errors(tmp_path):
        (tmp_path / "a").write_text("x" * 11)
    assert str(told.value) == (
        f"cannot write to the run folder {str(tmp_path)!r}: File too large; what is in it is kept"
    )


@limited()
def test_the_settings_of_a_run_are_not_lost_where_it_cannot_go_on(tmp_path: Path) -> None:
    run = create_run_folder(str(tmp_path / "r"), "shop", 'env = {name = "shop"}\n')
    run.close()
    limit(5)
    with pytest.raises(UserError, match=r"cannot write the run folder '.*r': File too large; give another --run.dir"):
        create_run_folder(str(run.folder), "shop", 'env = {name = "shop"}\n', resume=True)
    assert (run.folder / "config.toml").read_text() == 'env = {name = "shop"}\n'


@pytest.mark.parametrize("text", [None, "steps = ", "\xff"])
def test_a_run_without_its_settings_does_not_go_on(text: str | None, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    if text is not None:
        (tmp_path / "config.toml").write_text(text, "latin-1")
    with pytest.raises(UserError, match=r"cannot resume: its config.toml is missing or damaged; give another"):
        create_run_folder(str(tmp_path), "shop", "steps = 1\n", resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_folder_is_for_one_process_and_for_no_child_of_one_that_is_gone(tmp_path: Path) -> None:
    """A tool's process may live longer than the run that was killed."""
    code = (
        "import os, signal, subprocess, sys; from pathlib import Path; from agentrl.runs.atomic import FolderLock\n"
        f"lock = FolderLock(Path({str(tmp_path)!r}))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, close_fds=False)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", code]
    run = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    assert run.returncode == -9
    lock = FolderLock(tmp_path)
    with pytest.raises(UserError, match="another process is at the run in"):
        FolderLock(tmp_path)
    lock.close()
    FolderLock(tmp_path).close()


class Filling(Callback):
    """The disk is full from a phase of the second step on, until that is told."""

    def __init__(self, phase: str) -> None:
        self.phases, self.at, self.heard = 0, phase, list[str]()

    def on_phase_begin(self, name: str, episodes: int) -> None:
        self.phases += name == self.at
        if name == self.at and self.phases == 2:
            limit(1000)

    def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
        if self.at == "end" and step == 3:
            limit(1000)

    def on_message(self, text: str) -> None:
        self.heard.append(text)
        if "trying again" in text:
            limit(resource.RLIM_INFINITY)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["learn", "end"])
@limited()
def test_a_run_on_a_full_disk_waits_until_there_is_room(phase: str, tmp_path: Path) -> None:
    whole, full = tmp_path / "whole", tmp_path / "full"
    train("math-tools", run={"dir": str(whole), "save_every": 1}, **EXACT)
    callback = Filling(phase)
    train("math-tools", run={"dir": str(full), "save_every": 1}, callbacks=[callback], **EXACT)
    if phase == "learn":
        assert callback.heard == [
            "the episodes of step 2 are not written: File too large; trying again in 1 s (0 s so far). "
            f"The run waits: free some room on the disk of {str(full)!r}, or end it"
        ]
    else:
        missed, waiting = callback.heard
        assert missed == "no checkpoint of step 3: File too large; that of step 2 is whole"
        assert waiting.startswith("the model is not written: File too large; trying again in 1 s (0 s so far). The pol")
        assert f"ln -s /ANOTHER/DISK {full}/elsewhere" in waiting
    one, other = (load_file(run / "model" / "model.safetensors") for run in (whole, full))
    assert all(torch.equal(one[name], other[name]) for name in one)
    files = [{str(p.relative_to(run)) for p in run.rglob("*")} - {"events.jsonl"} for run in (whole, full)]
    assert files[0] == files[1]


def test_a_run_that_does_not_fit_is_refused_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "small", "size=10m") as small:
        assert main(["train", "--env", "math-tools", "--run.dir", f"{small}/r"]) == 2
        assert (
            f"the run does not fit on the disk of '{small}/r': 10.0 MiB are free, a checkpoint takes about 8.0 MiB, "
            "the model 4.0 MiB; free some, give another --run.dir, or --run.save_every 0: without checkpoints it takes "
            "4.0 MiB"
        ) in capsys.readouterr().err
        assert not list(small.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "newest"), [("13m", 1), ("20m", 2)])
def test_on_a_disk_with_room_for_one_checkpoint_the_run_ends_and_tells_the_truth(
    size: str, newest: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk(tmp_path / "small", f"size={size}") as small:
        words = [
            "train",
            "--env",
            "math-tools",
            "--steps",
            "2",
            "--rollout.tasks_per_step",
            "2",
            "--rollout.group_size",
            "2",
        ]
        words += ["--eval.every", "0", "--eval.final_tasks", "2", "--run.save_every", "1", "--run.dir", f"{small}/r"]
        assert main(words) == 0
        said = capsys.readouterr().out
        assert f"the disk of '{small}/r' may be full before the run ends: " in said
        missed = "no checkpoint of step 2: No space left on device; that of step 1 is whole" in said
        assert missed == (newest == 1)  # with 20 MiB it is the older one that gives way to the model
        assert not list(small.rglob("*.part"))
        assert (small / "r" / "model" / "model.safetensors").exists()
        subprocess.run(["mount", "-o", "remount,size=100m", str(small)], check=True)
        assert main(["train", "--resume", f"{small}/r"]) == 0
        assert f"going on after step {newest} of" in capsys.readouterr().out


class Ballast(Callback):
    """Fills the disk after a step, and does the next thing each time that the run waits for room."""

    def __init__(self, folder: Path, *then: Callable[[], None]) -> None:
        self.file, self.then, self.heard = folder / "ballast", list(then), list[str]()

    def on_step_end(self, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            with suppress(OSError), self.file.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))

    def on_message(self, text: str) -> None:
        self.heard.append(text)
        if "trying again" in text:
            self.then.pop(0)()


@pytest.mark.slow
def test_a_policy_without_a_checkpoint_is_written_elsewhere_once_that_is_told(tmp_path: Path) -> None:
    with disk(tmp_path / "small", "size=30m") as small:
        (tmp_path / "big").mkdir()
        callback = Ballast(small, lambda: (small / "r" / "elsewhere").symlink_to(tmp_path / "big"))
        callback.then.append(callback.file.unlink)  # the measurement at the end waits as well
        run = {"dir": str(small / "r"), "save_every": 0}
        summary = train("math-tools", run=run, callbacks=[callback], **EXACT | {"steps": 2}).summary
        first, model, measurement = callback.heard
        assert first == "no checkpoint of step 2: No space left on device; there is none yet"
        assert model.startswith("the model is not written: No space left on device; trying again in 1 s")
        assert re.match("the (measurement|held-out episodes) at step 2 (is|are) not written: No space", measurement)
        assert load_file(small / "r" / "model" / "model.safetensors")
        assert (small / "r" / "model").resolve() == tmp_path / "big" / "r" / "model"
        assert summary["checkpoint"] == 2
        assert train("math-tools", run=run | {"resume": True}, **EXACT | {"steps": 2}).summary["steps"] == 2


@pytest.mark.slow
def test_a_signal_gives_up_a_policy_that_cannot_be_written_and_the_checkpoint_stands(tmp_path: Path) -> None:
    def leave() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with disk(tmp_path / "small", "size=40m") as small:
        callback = Ballast(small, leave)
        run = {"dir": str(small / "r"), "save_every": 1}
        with pytest.raises(KeyboardInterrupt):
            train("math-tools", run=run, callbacks=[callback], **EXACT | {"steps": 2})
        assert "no checkpoint of step 2: No space left on device; that of step 1 is whole" in callback.heard
        callback.file.unlink()
        assert train("math-tools", run=run | {"resume": True}, **EXACT | {"steps": 2}).summary["steps"] == 2
