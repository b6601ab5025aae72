"""A process of a run on this machine: what it writes is read, and it ends with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.launch.child_process import ChildProcess
from tests.helpers.processes import wait_for_end

RUNS = ["serve-tools", "calculator", "--http", "0"]  # until somebody ends it


def read_to_end(child: ChildProcess) -> tuple[str, str, int]:
    out, err, status = b"", b"", None
    while status is None:
        more_out, more_err, status = child.poll()
        out, err = out + more_out, err + more_err
    return out.decode(), err.decode(), status


def test_what_it_writes_is_read_and_its_status_is_told(tmp_path: Path) -> None:
    child = ChildProcess()
    assert child.start(["--version"], {}, str(tmp_path)) == ""
    out, err, status = read_to_end(child)
    assert (out.startswith("agentrl "), err, status) == (True, "", 0)
    assert child.start(["trian"], {}) == ""  # again, in the same place
    assert read_to_end(child) == ("", "agentrl: no command 'trian'; did you mean 'train'?\n", 2)


def test_its_environment_is_what_it_is_given(tmp_path: Path) -> None:
    child = ChildProcess()
    child.start(["train", "--env", "math-tools", "--ranks", "2"], {"WORLD_SIZE": "7"}, str(tmp_path))
    assert "this is one of 7 that torchrun, srun or mpirun started" in read_to_end(child)[1]


def test_a_folder_that_is_not_there_is_said() -> None:
    assert ChildProcess().start(["--version"], {}, "/nowhere/at/all") == "No such file or directory: /nowhere/at/all"


def test_a_signal_and_a_kill_end_it() -> None:
    for end, expected in ((lambda c: c.send_signal(signal.SIGTERM), (143, -15)), (ChildProcess.kill, (-9,))):
        child = ChildProcess()
        child.kill()  # nothing runs yet
        child.send_signal(signal.SIGTERM)
        child.start(RUNS, {})
        end(child)
        assert read_to_end(child)[2] in expected
        child.kill()  # nothing runs any more


OWNER = """
import sys, time
from agentrl.launch.child_process import ChildProcess
child = ChildProcess()
child.start(sys.argv[1:], {})
print(child._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("after_s", [0.0, 8.0])
def test_it_ends_where_its_starter_is_killed(after_s: float) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *RUNS], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    time.sleep(after_s)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_for_end(pid)


def test_a_port_that_is_reserved_is_free() -> None:
    ports = {ChildProcess().reserve_port() for _ in range(3)}
    assert all(1024 < port < 65536 for port in ports)
