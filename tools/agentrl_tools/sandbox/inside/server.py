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
    from agentrl_tools.sandbox.inside import confine, pages
    from agentrl_tools.sandbox.inside import session as sessions
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confine
    import pages
    import session as sessions

CONTROL = 200  # a session's descriptor
MEGABYTE = 1 << 20


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
    """What a session may not do either is given up by the server itself, once (``confined``); a fork inherits it."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.bpf = base64.b64decode(str(settings["session_bpf"]))
        self.landlock = confine.landlock_version()
        self.limits = confine.limits(
            AS=int(str(settings["memory_mb"])) * MEGABYTE, CPU=int(str(settings["cpu_s"])), NOFILE=64
        )
        self.sessions: dict[str, Session] = {}
        self.spare: Session | None = None  # forked before it is needed
        self.leaving: list[Session] = []  # killed, and not yet gone: they end while the next one is forked
        self.inbox = b""
        self.selector = selectors.DefaultSelector()
        self.root = str(settings["root"])
        self.nothing = os.open(os.devnull, os.O_RDONLY) if os.path.exists(os.devnull) else os.pipe()[0]
        os.set_blocking(0, False)
        self.selector.register(0, selectors.EVENT_READ, None)

    def run(self) -> None:
        while True:
            if self.spare is None:
                self.spare = self._forked()
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
                self._moved_in(theirs.fileno(), into)
                self._confined(folder)
                sessions.serve(CONTROL)
            finally:
                os._exit(1)
        theirs.close()
        os.close(into)
        os.set_blocking(out, False)
        made = Session("", pid, ours, out, folder)
        self.selector.register(ours, selectors.EVENT_READ, made)
        self.selector.register(out, selectors.EVENT_READ, made)
        return made

    def _moved_in(self, control: int, into: int) -> None:
        """In the child: output down the pipe, nothing to read, and none of the server's descriptors."""
        os.dup2(control, CONTROL)
        os.dup2(self.nothing, 0)
        os.dup2(into, 1)
        os.dup2(into, 2)
        os.closerange(3, CONTROL)
        os.closerange(CONTROL + 1, 4096)

    def _confined(self, folder: str) -> None:
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
        confine.die_with_parent()
        confine.only_writes([folder, "/dev/null"], self.landlock)
        confine.limit(self.limits)
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
        keep = bool(request.get("keep"))
        if not keep:
            self._end(found.name)  # first: it ends while the answer is written
        self._reply(request, status, bytes(found.kept), found.dropped)
        if not keep:
            return
        os.kill(found.pid, signal.SIGSTOP)  # threads it left behind do not go on
        if _size(found.folder) > int(str(self.settings["disk_mb"])) * MEGABYTE:
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
        if found.pid:
            os.kill(found.pid, signal.SIGKILL)
        found.control.close()
        os.close(found.output)
        self.leaving.append(found)

    def _bury(self) -> None:
        """Wait for those that were killed, and take away their files."""
        for found in self.leaving:
            self._reaped(found)
            shutil.rmtree(found.folder, ignore_errors=True)
        self.leaving.clear()

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
    confined(settings)
    gc.collect()
    pages.collapsed()
    gc.freeze()
    os.write(1, json.dumps({"ready": confine.landlock_version(), "user": os.getuid()}).encode() + b"\n")
    Server(settings).run()


def confined(settings: dict[str, Any]) -> None:
    """All that every session gives up and the server does not need. It costs a session nothing."""
    os.environ.clear()
    os.environ.update(PATH="/usr/bin", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1")
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", errors="replace", closefd=False) for fd in (1, 2))
    if settings["drop_capabilities"]:
        confine.drop_bounding_set()
    confine.alone()
    version = confine.landlock_version()
    if settings["landlock"] and not version:
        sys.exit("this kernel has no landlock")
    confine.only_files(settings["readable"], [settings["root"], "/dev/null"], version)
    limits = {"FSIZE": 16 * MEGABYTE, "STACK": 16 * MEGABYTE, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 64}
    confine.limit(confine.limits(**limits))
    confine.filtered(base64.b64decode(settings["bpf"]))


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
