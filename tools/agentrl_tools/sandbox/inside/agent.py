"""The agent of a machine: its first process, which starts commands and hands on files, one request at a time.

Lines of JSON, by its standard input and output. Bytes are in base64.

    {"op": "exec", "command", "timeout_s"}  ->  {"exit_code", "stdout", "stderr", "cut"}  null: it took too long
    {"op": "read", "path"}                  ->  {"data"}
    {"op": "write", "path", "data"}         ->  {}
    what cannot be done                     ->  {"error"}

It touches no file of the machine and runs nothing itself: processes of another user do, where root gives one. What they
leave running is paused when an answer is given, and goes on with the next request.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import (
        confinement,
        machine_commands,
        machine_disk,
        machine_files,
        machine_processes,
    )
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confinement
    import machine_commands
    import machine_disk
    import machine_files
    import machine_processes

FILE_S = 8.0  # that reading or writing a file may take
SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        machine_disk.mount_disk(settings["disk_mb"], settings["files"], settings["user"])
    except OSError as error:
        _write_answer(answers, {"error": str(error)})
        return
    confinement.die_with_parent()  # what bubblewrap set is forgotten where rights change
    confinement.drop_privileges(machine_processes.CAPABILITIES if settings["user"] is not None else 0)
    os.environ.clear()
    os.environ.update(HOME=machine_disk.HOME, TMPDIR="/tmp", PATH="/usr/local/bin:/usr/bin:/bin")
    os.environ.update(LANG="C.UTF-8", TERM="dumb", USER="agent")
    agent = _Agent(settings)
    _write_answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        _write_answer(answers, agent.answer(line))


def _write_answer(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


class _Agent:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.processes = machine_processes.MachineProcesses(settings)
        self.commands = machine_commands.MachineCommands(self.processes)
        self.output_bytes: int = settings["output_bytes"]

    def answer(self, line: bytes) -> dict[str, Any]:
        """Handle a request, and return how that went, whatever it was."""
        self.processes.signal_all(signal.SIGCONT)
        try:
            return self._handle(json.loads(line))
        except Exception as error:
            return {"error": f"{error}"}
        finally:
            self.processes.signal_all(signal.SIGSTOP)
            self.processes.reap()

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "exec":
            return self._execute(request["command"], request["timeout_s"])
        path = request["path"]
        if request["op"] == "read":
            ended = self.commands.run(machine_files.read_file(path), FILE_S, machine_files.MAX_BYTES)
        else:
            data = base64.b64decode(request["data"])
            ended = self.commands.run(machine_files.write_file(path, data), FILE_S, self.output_bytes)
        if ended.code == 0:
            return {"data": base64.b64encode(ended.out.head).decode()}
        if ended.code is None:
            return {"error": f"{path}: it took over {FILE_S:g} s"}
        said = ended.err.head.decode(errors="replace")
        return {"error": f"{said or f'{path}: that was ended by something else in the machine'}{ended.note}"}

    def _execute(self, command: str, timeout_s: float) -> dict[str, Any]:
        def work() -> None:
            os.execv(SHELL, [SHELL, "-c", command])

        ended = self.commands.run(work, timeout_s, self.output_bytes)
        stdout, stderr = (base64.b64encode(x).decode() for x in (ended.out.head, ended.err.head + ended.note.encode()))
        return {"exit_code": ended.code, "stdout": stdout, "stderr": stderr, "cut": ended.out.cut + ended.err.cut}


if __name__ == "__main__":
    _main()
