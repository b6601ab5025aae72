"""The agent of a machine: it runs commands, reads and writes files, one request at a time.

Lines of JSON, by its standard input and output. Bytes are in base64.

    {"op": "exec", "command", "timeout_s"}  ->  {"exit_code", "stdout", "stderr", "cut"}  null: it took too long
    {"op": "read", "path"}                  ->  {"data"}
    {"op": "write", "path", "data"}         ->  {}
    what cannot be done                     ->  {"error"}
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import confinement
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confinement

MEGABYTE = 1 << 20
SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def _main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    home = settings["root"]
    if settings["user"] is not None:
        confinement.switch_user(settings["user"])
    os.makedirs(home, exist_ok=True)
    os.chdir(home)
    os.environ.clear()
    os.environ.update(HOME=home, TMPDIR="/tmp", PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8", TERM="dumb")
    confinement.drop_privileges()
    limits = confinement.build_limits(
        AS=settings["memory_mb"] * MEGABYTE,
        CPU=settings["cpu_s"],
        FSIZE=settings["disk_mb"] * MEGABYTE,
        NOFILE=256,
        NPROC=1024,
        CORE=0,
        MEMLOCK=0,
        MSGQUEUE=0,
    )
    confinement.set_limits(limits)
    confinement.load_seccomp_filter(base64.b64decode(settings["bpf"]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # commands have no hold of the answers
    _write_answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        try:
            _write_answer(answers, _handle(json.loads(line), settings["output_bytes"]))
        except OSError as error:
            _write_answer(answers, {"error": f"{error.strerror}: {error.filename}" if error.filename else str(error)})


def _write_answer(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _handle(request: dict[str, Any], output_bytes: int) -> dict[str, Any]:
    if request["op"] == "exec":
        return _execute(request["command"], request["timeout_s"], output_bytes)
    path = Path(request["path"])
    if request["op"] == "read":
        with path.open("rb") as file:
            return {"data": base64.b64encode(file.read(MEGABYTE)).decode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(request["data"]))
    return {}


def _execute(command: str, timeout_s: float, output_bytes: int) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        shell = subprocess.Popen(
            [SHELL, "-c", command], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code: int | None = shell.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        (stdout, more), (stderr, more_err) = _head(out, output_bytes), _head(err, output_bytes)
    return {"exit_code": code, "stdout": stdout, "stderr": stderr, "cut": more + more_err}


def _head(file: Any, size: int) -> tuple[str, int]:
    total = file.seek(0, os.SEEK_END)
    file.seek(0)
    return base64.b64encode(file.read(size)).decode(), max(0, total - size)


if __name__ == "__main__":
    _main()
