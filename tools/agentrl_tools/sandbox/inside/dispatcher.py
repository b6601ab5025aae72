"""The dispatcher: it holds requests, pipes, deadlines and replies. No model's code runs in it or in a fork of it.

In and out go lines of JSON, by its standard input and output:

    {"id", "session", "code", "timeout_s", "keep", "old", "output_bytes"}   ->  {"id", "status", "output", "cut"}
    {"end": SESSION}

``status`` is ``ok``, ``raised``, ``timeout``, ``ended``, ``died`` (with the signal), or ``refused``, with a sentence:
this request could not be begun here. What concerns a session ends that session.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import descriptors, folders
    from agentrl_tools.sandbox.inside import session as sessions
    from agentrl_tools.sandbox.inside import zygote as zygotes
else:  # by its file: this runs where the package is not
    import descriptors
    import folders
    import session as sessions
    import zygote as zygotes

MEGABYTE = 1 << 20
LEAVE_S = 0.05  # that a session which closed its socket has to end by itself
POLITE_S = 0.25  # after which a call yields to those that have just begun
WATCH_S = 0.02  # between two looks at a folder that has no size of its own


@dataclass
class _Session:
    """A session's process, as it is seen from here, and the request it is at."""

    control: socket.socket
    output: int
    user: int | None
    folder: str  # where it has no mount of its own
    pid: int = 0  # not known yet
    name: str = ""
    started: bool = False
    request: dict[str, Any] | None = None
    deadline: float = float("inf")
    polite_at: float = float("inf")
    unsent: bytes | memoryview = b""
    kept: bytearray = field(default_factory=bytearray)
    dropped: int = 0
    trouble: bytes = b""  # what it says that went wrong before any code was run
    stage: str = "live"  # then "leaving": it has closed its socket; then "over": it is dead or about to be


class Dispatcher:
    """Requests in, sessions in between, replies out. All of it in one loop that never waits for one of them."""

    def __init__(self, settings: dict[str, Any], zygote: socket.socket, tmpfs: bool) -> None:
        self.settings, self.zygote, self.tmpfs = settings, zygote, tmpfs
        self.free = deque(settings["users"] or ())
        self.sessions: dict[str, _Session] = {}
        self.spare: _Session | None = None  # forked before it is needed
        self.forked: deque[_Session] = deque()  # of which the zygote has not told the process
        self.ending: dict[int, _Session] = {}  # until the zygote tells that they are gone
        self.unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.remover = None if tmpfs else folders.Remover()
        self.inbox = bytearray()
        self.watch_at = float("inf") if tmpfs else 0.0
        self.selector = selectors.DefaultSelector()
        os.set_blocking(0, False)
        zygote.setblocking(False)
        self.selector.register(0, selectors.EVENT_READ, None)
        self.selector.register(zygote, selectors.EVENT_READ, zygote)

    def run(self) -> None:
        self._top_up()
        while True:
            for key, events in self.selector.select(self._patience()):
                if key.data is None:
                    if not self._read_requests():
                        return
                elif key.data is self.zygote:
                    if events & selectors.EVENT_WRITE:
                        self._flush()
                    if events & selectors.EVENT_READ and not self._hear_zygote():
                        sys.exit("the zygote ended")
                elif key.data.stage != "over":
                    self._handle(key.data, key.fd, events)
            self._look_at_the_clock()

    def _patience(self) -> float | None:
        """Return the seconds until something is due."""
        due = min((min(s.deadline, s.polite_at) for s in self.sessions.values()), default=float("inf"))
        if not self.tmpfs and any(s.request for s in self.sessions.values()):
            due = min(due, self.watch_at)
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for session in [s for s in self.sessions.values() if min(s.deadline, s.polite_at) <= now]:
            if session.deadline <= now:
                self._finish(session, "timeout" if session.stage == "live" else "died 9")
            else:
                session.polite_at = float("inf")
                self._renice(session, 10)
        if now >= self.watch_at:
            self.watch_at = now + WATCH_S
            at_work = [s for s in self.sessions.values() if s.request and s.started]
            for session in filter(self._is_over_its_space, at_work):
                self._finish(session, "died 25")  # SIGXFSZ, as a single file's would be

    def _is_over_its_space(self, session: _Session) -> bool:
        size, files = folders.measure(session.folder, self.settings["files"])
        return bool(size > self.settings["disk_mb"] * MEGABYTE or files > self.settings["files"])

    def _read_requests(self) -> bool:
        """Read requests and begin them. Return False if the client has ended."""
        try:
            data = os.read(0, 1 << 20)
        except BlockingIOError:
            return True
        self.inbox += data
        if b"\n" not in data:
            return bool(data)
        *lines, self.inbox = self.inbox.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "end" not in request:
                self._begin(request)
            elif request["end"] in self.sessions:
                self._finish(self.sessions[request["end"]], "ended")
        return bool(data)

    def _begin(self, request: dict[str, Any]) -> None:
        name = str(request["session"])
        session = self.sessions.get(name)
        if session is None and request.get("old"):
            self._reply(request, "died", b"", 0)  # between two calls
            return
        if session is not None and session.request is not None:
            self._reply(request, "refused", b"the session is at another call", 0)
            return
        if session is None:
            try:
                session, self.spare = self.spare or self._fork(), None
            except OSError as error:
                self._reply(request, "refused", self._explain(error).encode(), 0)
                return
            session.name, self.sessions[name] = name, session
        now = time.monotonic()
        session.request, session.kept, session.dropped = request, bytearray(), 0
        session.deadline, session.polite_at = now + float(request["timeout_s"]), now + POLITE_S
        code = str(request["code"]).encode("utf-8", "replace")
        session.unsent = memoryview(struct.pack("=I", len(code)) + code)
        if session.pid:
            self._renice(session, 0)
            os.kill(session.pid, signal.SIGCONT)
        self._send_code(session)
        self._top_up()

    def _explain(self, error: OSError) -> str:
        held = len(self.sessions)
        if error.errno == 24:
            most = descriptors.allow_all()
            return (
                f"{held} sessions are held, and no more fit within {most} open files (two for each): raise the hard "
                f"limit ('ulimit -Hn'), or keep fewer"
            )
        return f"{held} sessions are held, and another cannot be begun: {error.strerror or error}"

    def _top_up(self) -> None:
        """Have a session forked for the next request, if that can be done."""
        if self.spare is None and not self.unsent:
            with contextlib.suppress(OSError):  # whoever needs one is told
                self.spare = self._fork()

    def _fork(self) -> _Session:
        """Ask the zygote for a session. Its process is told later; it can be spoken to at once."""
        if self.settings["users"] and not self.free:
            raise OSError(11, f"all of its {len(self.settings['users'])} users are taken")
        ours, theirs = socket.socketpair()
        try:
            out, into = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
        ours.setblocking(False)
        os.set_blocking(out, False)
        user = self.free.popleft() if self.settings["users"] else None
        name = os.urandom(16).hex()
        session = _Session(ours, out, user, f"{self.settings['folders']}/{name}")
        self.selector.register(ours, selectors.EVENT_READ, session)
        self.selector.register(out, selectors.EVENT_READ, session)
        self.forked.append(session)
        number = zygotes.NO_USER if user is None else user
        self._tell_zygote(struct.pack("=cI", b"F", number) + name.encode(), (theirs.detach(), into))
        return session

    def _tell_zygote(self, message: bytes, passed: tuple[int, ...] = ()) -> None:
        self.unsent.append((message, passed))
        self._flush()

    def _flush(self) -> None:
        """Send the zygote what it can take now."""
        while self.unsent:
            message, passed = self.unsent[0]
            try:
                socket.send_fds(self.zygote, [message], passed)
            except BlockingIOError:
                break
            self.unsent.popleft()
            for descriptor in passed:
                os.close(descriptor)
        writing = selectors.EVENT_WRITE if self.unsent else 0
        self.selector.modify(self.zygote, selectors.EVENT_READ | writing, self.zygote)

    def _hear_zygote(self) -> bool:
        """Take what the zygote tells. Return False if it has ended."""
        while True:
            try:
                message = self.zygote.recv(64)
            except BlockingIOError:
                return True
            if not message:
                return False
            kind, pid = struct.unpack_from("=cI", message)
            if kind == b"P":
                self._set_process(self.forked.popleft(), pid)
            else:
                self._bury(self.ending.pop(pid), struct.unpack("=cIi", message)[2])

    def _set_process(self, session: _Session, pid: int) -> None:
        session.pid = pid
        if session.stage != "live":
            self._await(session)
        elif not pid:
            session.trouble = b"no process can be made"
            self._finish(session, "died")

    def _bury(self, session: _Session, status: int) -> None:
        """Free the user and the folder of a session that is gone, and tell how it ended where that is waited for."""
        if session.stage == "leaving":
            self._finish(session, f"died {-status}" if status < 0 else "ended", gone=True)
        if self.remover:
            self.remover.remove(session.folder)
        if session.user is not None:
            self.free.append(session.user)

    def _handle(self, session: _Session, descriptor: int, events: int) -> None:
        if descriptor == session.output:
            self._drain(session)
            return
        if events & selectors.EVENT_WRITE:
            self._send_code(session)
        if not events & selectors.EVENT_READ or session in self.forked:  # its process will be told at once
            return
        try:
            told = session.control.recv(1 if session.started else 2048)
        except OSError:
            told = b""
        if not session.started and told[:1] == sessions.STARTED:  # before any code: nobody can forge it
            session.started = True
            told = told[1:]
            if not told:
                return
        if not session.started:
            session.trouble += told
        if not told:
            self._leave(session)
        elif session.started and session.request is not None and told in (sessions.DONE, sessions.RAISED):
            self._answer(session, "ok" if told == sessions.DONE else "raised")
        elif session.started:
            self._finish(session, "died 9")  # it says what no session says

    def _send_code(self, session: _Session) -> None:
        """Send a session what it can take of its code now."""
        try:
            session.unsent = session.unsent[session.control.send(session.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it ended meanwhile, which is told by what can be read
            session.unsent = b""
        writing = selectors.EVENT_WRITE if session.unsent else 0
        self.selector.modify(session.control, selectors.EVENT_READ | writing, session)

    def _renice(self, session: _Session, nice: int) -> None:
        """Let a call that takes long yield to others, with all of its threads, and the next begin as any."""
        with contextlib.suppress(OSError):  # without CAP_SYS_NICE it stays as it is
            if os.getpriority(os.PRIO_PGRP, session.pid) != nice:
                os.setpriority(os.PRIO_PGRP, session.pid, nice)

    def _drain(self, session: _Session) -> None:
        """Keep what a session wrote so far, up to a limit; count the bytes of the rest."""
        limit = int((session.request or {}).get("output_bytes") or self.settings["output_bytes"])
        for _ in range(16):  # then others are heard again
            try:
                data = os.read(session.output, 1 << 16)
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
        if request is None or not request.get("keep"):
            self._finish(session, status)
            return
        os.kill(session.pid, signal.SIGSTOP)  # threads it left behind do not go on
        self._drain(session)
        if not self.tmpfs and self._is_over_its_space(session):
            self._finish(session, "died 25")
            return
        session.request, session.deadline, session.polite_at = None, float("inf"), float("inf")
        self._reply(request, status, bytes(session.kept), session.dropped)

    def _leave(self, session: _Session) -> None:
        """Wait a little for the end of a session that has closed its socket: how it ended is its result."""
        session.stage = "leaving"
        self.selector.unregister(session.control)
        if not session.started:
            self._finish(session, "died")
            return
        session.deadline = time.monotonic() + LEAVE_S
        self._await(session)

    def _await(self, session: _Session) -> None:
        """Have the zygote wait for the end of a process, which is killed where it is over."""
        if session.pid:
            again = session.pid in self.ending
            kind = b"W" if session.stage == "leaving" else b"L" if again else b"K"
            self.ending[session.pid] = session
            self._tell_zygote(struct.pack("=cI", kind, session.pid))
        elif session.user is not None:  # it never was
            self.free.append(session.user)

    def _finish(self, session: _Session, status: str, gone: bool = False) -> None:
        """End a session, and answer the request that it is at."""
        self._drain(session)
        session.stage, request, session.request = "over", session.request, None
        if session is self.spare:
            self.spare = None
        self.sessions.pop(session.name, None)
        for watched in (session.control, session.output):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(watched)
        if not gone and (session.pid or session not in self.forked):
            self._await(session)  # first: it ends while the answer is written
        session.control.close()
        os.close(session.output)
        if request is None:
            return
        if session.started:
            self._reply(request, status, bytes(session.kept), session.dropped)
        else:
            words = session.trouble or f"a session ended before it began ({status})".encode()
            self._reply(request, "timeout" if status == "timeout" else "refused", words, 0)

    def _reply(self, request: dict[str, Any], status: str, output: bytes, cut: int) -> None:
        text = output.decode("utf-8", "replace")
        line = json.dumps({"id": request["id"], "status": status, "output": text, "cut": cut}).encode() + b"\n"
        while line:
            line = line[os.write(1, line) :]
