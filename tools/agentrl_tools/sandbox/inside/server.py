"""The fork server: warm, with what is imported often; a session is a fork of it.

In and out go lines of JSON, by its standard input and output:

    {"id", "session", "code", "timeout_s", "keep"}   ->  {"id", "status", "output", "cut"}
    {"end": SESSION}

``status`` is ``ok``, ``raised``, ``timeout``, ``died`` (with the signal) or ``lost`` (a session that is no more).
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import confine
    from agentrl_tools.sandbox.inside import session as sessions
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confine
    import session as sessions


@dataclass
class Session:
    """A process, and the request it is at."""

    name: str
    pid: int
    control: socket.socket
    output: int
    folder: str
    request: dict[str, object] | None = None
    deadline: float = 0.0
    kept: bytearray = field(default_factory=bytearray)
    dropped: int = 0


class Server:
    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.bpf = base64.b64decode(str(settings["bpf"]))
        self.sessions: dict[str, Session] = {}
        self.spare: Session | None = None  # forked before it is needed
        self.inbox = b""
        self.selector = selectors.DefaultSelector()
        self.root = str(settings["root"])
        os.set_blocking(0, False)
        self.selector.register(0, selectors.EVENT_READ, None)

    def run(self) -> None:
        while True:
            if self.spare is None:
                self.spare = self._forked()
            now = time.monotonic()
            waits = [s.deadline - now for s in self.sessions.values() if s.request is not None]
            for key, _ in self.selector.select(max(0.0, min(waits)) if waits else None):
                if key.data is None:
                    if not self._read_requests():
                        return
                elif key.data is self.spare:
                    sys.exit("a session ended before it began")
                elif key.data.name in self.sessions:
                    self._heard(key.data, key.fd)
            now = time.monotonic()
            for late in [s for s in self.sessions.values() if s.request is not None and s.deadline <= now]:
                self._over(late, "timeout")

    def _read_requests(self) -> bool:
        """False: nobody is there any more."""
        try:
            data = os.read(0, 1 << 20)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.inbox += data
        *lines, self.inbox = self.inbox.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "end" in request:
                self._end(request["end"])
            else:
                self._begin(request)
        return True

    def _begin(self, request: dict[str, object]) -> None:
        name = str(request["session"])
        if name not in self.sessions:
            if request.get("old"):
                self._reply(request, "lost", b"", 0)
                return
            found, self.spare = self.spare or self._forked(), None
            found.name, self.sessions[name] = name, found
        found = self.sessions[name]
        found.request, found.kept, found.dropped = request, bytearray(), 0
        found.deadline = time.monotonic() + float(str(request["timeout_s"]))
        code = str(request["code"]).encode("utf-8", "replace")
        message = struct.pack("=I", len(code)) + code
        try:
            os.kill(found.pid, signal.SIGCONT)
            if found.control.send(message, socket.MSG_DONTWAIT) < len(message):  # it does not listen
                self._over(found, "timeout")
        except BlockingIOError:
            self._over(found, "timeout")
        except OSError:  # it ended meanwhile, which its sockets tell
            pass

    def _forked(self) -> Session:
        folder = f"{self.root}/{os.urandom(16).hex()}"
        os.mkdir(folder, 0o700)
        ours, theirs = socket.socketpair()
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                self.selector.close()
                sessions.serve(self._moved_in(theirs, into), lambda: self._confined(folder))
            finally:
                os._exit(1)
        theirs.close()
        os.close(into)
        os.set_blocking(out, False)
        made = Session("", pid, ours, out, folder)
        self.selector.register(ours, selectors.EVENT_READ, made)
        self.selector.register(out, selectors.EVENT_READ, made)
        return made

    def _moved_in(self, control: socket.socket, into: int) -> socket.socket:
        """In the child: output down the pipe, nothing to read, and none of the server's descriptors."""
        at = os.dup2(control.fileno(), 200)
        nothing = os.open(os.devnull, os.O_RDONLY) if os.path.exists(os.devnull) else os.pipe()[0]
        os.dup2(nothing, 0)
        os.dup2(into, 1)
        os.dup2(into, 2)
        control.detach()
        os.closerange(3, at)
        os.closerange(at + 1, 4096)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (
            os.fdopen(fd, "w", encoding="utf-8", errors="replace", closefd=False) for fd in (1, 2)
        )
        return socket.socket(fileno=at)

    def _confined(self, folder: str) -> None:
        settings = self.settings
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder, PATH="/usr/bin", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1")
        confine.alone()
        confine.die_with_parent()
        readable = [str(p) for p in settings["readable"]]  # type: ignore[attr-defined]
        if not confine.only_files(readable, [folder, "/dev/null"]) and settings["landlock"]:
            os._exit(1)
        megabyte = 1 << 20
        confine.limit(
            AS=int(str(settings["memory_mb"])) * megabyte,
            CPU=int(str(settings["cpu_s"])),
            FSIZE=16 * megabyte,
            NOFILE=64,
            CORE=0,
            STACK=16 * megabyte,
            MEMLOCK=0,
            MSGQUEUE=0,
            SIGPENDING=64,
        )
        confine.filtered(self.bpf)

    def _heard(self, found: Session, descriptor: int) -> None:
        if descriptor == found.output:
            self._drain(found)
            return
        try:
            ended = found.control.recv(1)
        except OSError:
            ended = b""
        if ended in (sessions.DONE, sessions.RAISED) and found.request is not None:
            self._drain(found)
            self._answer(found, "ok" if ended == sessions.DONE else "raised")
        else:
            self._over(found, "died")

    def _drain(self, found: Session) -> None:
        """What it wrote so far, up to a limit; of the rest only how much it was."""
        limit = int(str(self.settings["output_bytes"]))
        for _ in range(64):  # then others are heard again
            try:
                data = os.read(found.output, 1 << 18)
            except BlockingIOError:
                return
            if not data:  # its end; which may be met twice
                with contextlib.suppress(KeyError):
                    self.selector.unregister(found.output)
                return
            room = max(0, limit - len(found.kept))
            found.kept += data[:room]
            found.dropped += len(data) - min(room, len(data))

    def _answer(self, found: Session, status: str) -> None:
        request = found.request
        found.request = None
        if request is None:
            return
        self._reply(request, status, bytes(found.kept), found.dropped)
        if not request.get("keep"):
            self._end(found.name)
            return
        os.kill(found.pid, signal.SIGSTOP)  # threads it left behind do not go on
        if _size(found.folder) > int(str(self.settings["disk_mb"])) << 20:
            self._end(found.name)

    def _over(self, found: Session, status: str) -> None:
        """It took too long, or ended by itself."""
        if status == "timeout":
            os.kill(found.pid, signal.SIGKILL)
        self._drain(found)
        if status == "died":
            code = self._reaped(found, tries=40)
            status = f"died {-code}" if code < 0 else "ended"
        request, found.request = found.request, None
        self._end(found.name)
        if request is not None:
            self._reply(request, status, bytes(found.kept), found.dropped)

    def _end(self, name: str) -> None:
        found = self.sessions.pop(name, None)
        if found is None:
            return
        for watched in (found.control, found.output):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(watched)
        found.control.close()
        os.close(found.output)
        self._reaped(found)
        shutil.rmtree(found.folder, ignore_errors=True)

    def _reaped(self, found: Session, tries: int = 0) -> int:
        """Its exit status; the signal that ended it, negative. One that has closed its socket is about to end."""
        if not found.pid:
            return 0
        ended, status = os.waitpid(found.pid, os.WNOHANG)
        while not ended and tries:
            time.sleep(0.0005)
            tries -= 1
            ended, status = os.waitpid(found.pid, os.WNOHANG)
        if not ended:
            os.kill(found.pid, signal.SIGKILL)
            _, status = os.waitpid(found.pid, 0)
        found.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _reply(self, request: dict[str, object], status: str, output: bytes, cut: int) -> None:
        text = output.decode("utf-8", "replace")
        line = json.dumps({"id": request["id"], "status": status, "output": text, "cut": cut}).encode() + b"\n"
        while line:
            line = line[os.write(1, line) :]


def _size(folder: str) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def main() -> None:
    settings = json.loads(_line())
    if settings["user"] is not None:
        confine.drop_to(settings["user"])
    if not os.access(os.__file__, os.R_OK):
        os.write(1, json.dumps({"error": f"user {os.getuid()} cannot read {os.__file__}"}).encode() + b"\n")
        return
    os.makedirs(settings["root"], exist_ok=True)
    os.chmod(settings["root"], 0o300)  # sessions do not see each other's names
    for name in settings["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    confine.alone()
    gc.collect()
    gc.freeze()
    os.write(1, json.dumps({"ready": confine.landlock_version(), "user": os.getuid()}).encode() + b"\n")
    Server(settings).run()


def _line() -> bytes:
    """Unbuffered: what comes after it is the server's."""
    found = b""
    while not found.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit("nobody is there")
        found += byte
    return found


if __name__ == "__main__":
    main()
