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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import confinement, huge_pages
    from agentrl_tools.sandbox.inside import session as sessions
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confinement
    import huge_pages
    import session as sessions

CONTROL = 200  # a session's descriptor
MEGABYTE = 1 << 20


@dataclass
class _Session:
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


class _ForkServer:
    """The server of sessions. It gives up once what no session may do (`_confine`); a fork inherits that."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.bpf = base64.b64decode(str(settings["session_bpf"]))
        self.landlock = confinement.get_landlock_version()
        self.limits = confinement.build_limits(
            AS=int(str(settings["memory_mb"])) * MEGABYTE, CPU=int(str(settings["cpu_s"])), NOFILE=64
        )
        self.sessions: dict[str, _Session] = {}
        self.spare: _Session | None = None  # forked before it is needed
        self.leaving: list[_Session] = []  # killed, and not yet gone: they end while the next one is forked
        self.inbox = b""
        self.selector = selectors.DefaultSelector()
        self.root = str(settings["root"])
        self.nothing = os.open(os.devnull, os.O_RDONLY) if os.path.exists(os.devnull) else os.pipe()[0]
        os.set_blocking(0, False)
        self.selector.register(0, selectors.EVENT_READ, None)

    def run(self) -> None:
        while True:
            if self.spare is None:
                self.spare = self._fork()
            self._bury()
            now = time.monotonic()
            waits = [s.deadline - now for s in self.sessions.values() if s.request is not None]
            for key, _ in self.selector.select(max(0.0, min(waits)) if waits else None):
                if key.data is None:
                    if not self._read_requests():
                        return
                elif key.data is self.spare:
                    sys.exit("a session ended before it began")
                elif key.data.name in self.sessions:
                    self._handle(key.data, key.fd)
            now = time.monotonic()
            for late in [s for s in self.sessions.values() if s.request is not None and s.deadline <= now]:
                self._finish(late, "timeout")

    def _read_requests(self) -> bool:
        """Read requests and begin them. Return False if the client has ended."""
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
            session, self.spare = self.spare or self._fork(), None
            session.name, self.sessions[name] = name, session
        session = self.sessions[name]
        session.request, session.kept, session.dropped = request, bytearray(), 0
        session.deadline = time.monotonic() + float(str(request["timeout_s"]))
        code = str(request["code"]).encode("utf-8", "replace")
        message = struct.pack("=I", len(code)) + code
        try:
            os.kill(session.pid, signal.SIGCONT)
            if session.control.send(message, socket.MSG_DONTWAIT) < len(message):  # it does not listen
                self._finish(session, "timeout")
        except BlockingIOError:
            self._finish(session, "timeout")
        except OSError:  # it ended meanwhile, which its sockets tell
            pass

    def _fork(self) -> _Session:
        folder = f"{self.root}/{os.urandom(16).hex()}"
        os.mkdir(folder, 0o700)
        ours, theirs = socket.socketpair()
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._set_up_descriptors(theirs.fileno(), into)
                self._confine_session(folder)
                sessions.serve(CONTROL)
            finally:
                os._exit(1)
        theirs.close()
        os.close(into)
        os.set_blocking(out, False)
        made = _Session("", pid, ours, out, folder)
        self.selector.register(ours, selectors.EVENT_READ, made)
        self.selector.register(out, selectors.EVENT_READ, made)
        return made

    def _set_up_descriptors(self, control: int, into: int) -> None:
        """Set up the child's descriptors: output down the pipe, nothing to read, none of the server's."""
        os.dup2(control, CONTROL)
        os.dup2(self.nothing, 0)
        os.dup2(into, 1)
        os.dup2(into, 2)
        os.closerange(3, CONTROL)
        os.closerange(CONTROL + 1, 4096)

    def _confine_session(self, folder: str) -> None:
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
        confinement.die_with_parent()
        confinement.restrict_writes([folder, "/dev/null"], self.landlock)
        confinement.set_limits(self.limits)
        confinement.load_seccomp_filter(self.bpf)

    def _handle(self, session: _Session, descriptor: int) -> None:
        if descriptor == session.output:
            self._drain(session)
            return
        try:
            ended = session.control.recv(1)
        except OSError:
            ended = b""
        if ended in (sessions.DONE, sessions.RAISED) and session.request is not None:
            self._drain(session)
            self._answer(session, "ok" if ended == sessions.DONE else "raised")
        else:
            self._finish(session, "died")

    def _drain(self, session: _Session) -> None:
        """Keep what a session wrote so far, up to a limit; count the bytes of the rest."""
        limit = int(str(self.settings["output_bytes"]))
        for _ in range(64):  # then others are heard again
            try:
                data = os.read(session.output, 1 << 18)
            except BlockingIOError:
                return
            if not data:  # its end; which may be met twice
                with contextlib.suppress(KeyError):
                    self.selector.unregister(session.output)
                return
            room = max(0, limit - len(session.kept))
            session.kept += data[:room]
            session.dropped += len(data) - min(room, len(data))

    def _answer(self, session: _Session, status: str) -> None:
        request = session.request
        session.request = None
        if request is None:
            return
        keep = bool(request.get("keep"))
        if not keep:
            self._end(session.name)  # first: it ends while the answer is written
        self._reply(request, status, bytes(session.kept), session.dropped)
        if not keep:
            return
        os.kill(session.pid, signal.SIGSTOP)  # threads it left behind do not go on
        if _size(session.folder) > int(str(self.settings["disk_mb"])) * MEGABYTE:
            self._end(session.name)

    def _finish(self, session: _Session, status: str) -> None:
        """It took too long, or ended by itself."""
        if status == "timeout":
            os.kill(session.pid, signal.SIGKILL)
        self._drain(session)
        if status == "died":
            code = self._reap(session, tries=40)
            status = f"died {-code}" if code < 0 else "ended"
        request, session.request = session.request, None
        self._end(session.name)
        if request is not None:
            self._reply(request, status, bytes(session.kept), session.dropped)

    def _end(self, name: str) -> None:
        session = self.sessions.pop(name, None)
        if session is None:
            return
        for watched in (session.control, session.output):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(watched)
        if session.pid:
            os.kill(session.pid, signal.SIGKILL)
        session.control.close()
        os.close(session.output)
        self.leaving.append(session)

    def _bury(self) -> None:
        """Wait for those that were killed, and take away their files."""
        for session in self.leaving:
            self._reap(session)
            shutil.rmtree(session.folder, ignore_errors=True)
        self.leaving.clear()

    def _reap(self, session: _Session, tries: int = 0) -> int:
        """Return a session's exit status, or its signal, negative. One that has closed its socket is about to end."""
        if not session.pid:
            return 0
        ended, status = os.waitpid(session.pid, os.WNOHANG)
        while not ended and tries:
            time.sleep(0.0005)
            tries -= 1
            ended, status = os.waitpid(session.pid, os.WNOHANG)
        if not ended:
            os.kill(session.pid, signal.SIGKILL)
            _, status = os.waitpid(session.pid, 0)
        session.pid = 0
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


def _main() -> None:
    settings = json.loads(_line())
    if settings["user"] is not None:
        confinement.switch_user(settings["user"])
    if not os.access(os.__file__, os.R_OK):
        os.write(1, json.dumps({"error": f"user {os.getuid()} cannot read {os.__file__}"}).encode() + b"\n")
        return
    os.makedirs(settings["root"], exist_ok=True)
    os.chmod(settings["root"], 0o300)  # sessions do not see each other's names
    for name in settings["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _confine(settings)
    gc.collect()
    huge_pages.collapse()
    gc.freeze()
    os.write(1, json.dumps({"ready": confinement.get_landlock_version(), "user": os.getuid()}).encode() + b"\n")
    _ForkServer(settings).run()


def _confine(settings: dict[str, Any]) -> None:
    """Give up all that no session may do and the server does not need. It costs a session nothing."""
    os.environ.clear()
    os.environ.update(PATH="/usr/bin", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1")
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", errors="replace", closefd=False) for fd in (1, 2))
    if settings["drop_capabilities"]:
        confinement.drop_bounding_set()
    confinement.drop_privileges()
    version = confinement.get_landlock_version()
    if settings["landlock"] and not version:
        sys.exit("this kernel has no landlock")
    confinement.restrict_files(settings["readable"], [settings["root"], "/dev/null"], version)
    limits = {"FSIZE": 16 * MEGABYTE, "STACK": 16 * MEGABYTE, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 64}
    confinement.set_limits(confinement.build_limits(**limits))
    confinement.load_seccomp_filter(base64.b64decode(settings["bpf"]))


def _line() -> bytes:
    """Read one line unbuffered: the bytes after it are the server's."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit("nobody is there")
        line += byte
    return line


if __name__ == "__main__":
    _main()
