"""A watchdog of the event loop: code that does not await stops every episode, and the engine with them; it is named.

A thread looks at the loop's stack now and then. Where the loop does not turn, a function of the user's is blamed if
one and the same call of it was there all the while: not whatever happened to run when a busy machine let the loop go
on, not the loop that waits, and not what agentrl does itself.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import NamedTuple

LIMIT_S = 0.25
_OURS = ("agentrl", "agentrl_envs", "agentrl_tools")
_CALLERS = tuple(
    f"agentrl.{module}"
    for module in ("rollout.episode", "environments.env", "tools.tool", "rollout.group_scoring", "rewards.functions")
)  # of the user's
_LIBRARIES = tuple({*(sysconfig.get_path(name) for name in ("purelib", "platlib")), "<"})  # and frozen modules
_PYTHON = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))})


@contextmanager
def watch_event_loop(
    tell: Callable[[str], None], limit_s: float = LIMIT_S, *, whose: tuple[str, ...] | None = None
) -> Iterator[None]:
    """Call ``tell``, in the loop, for each function that held it up that long, once a function.

    To be entered where the loop runs. ``whose``: the beginnings of file names; only functions
    from there are told of, and not while they call agentrl's.
    """
    watch = _Watch(asyncio.get_running_loop(), tell, limit_s, whose)
    watch.beat()
    thread = threading.Thread(target=watch.look, name="agentrl loop watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.over.set()
        thread.join()


class _Sighting(NamedTuple):
    """Calls that were there at each look from the first to the last, the innermost first, and their lines.

    In seconds without those that the thread waited for a processor.
    """

    calls: Sequence[tuple[FrameType, int]] = ()
    first: float = 0.0
    last: float = 0.0

    @property
    def seconds(self) -> float:
        return self.last - self.first if self.calls else 0.0


class _Watch:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[str], None],
        limit_s: float,
        whose: tuple[str, ...] | None,
    ) -> None:
        self.loop, self.tell, self.limit_s, self.whose = loop, tell, limit_s, whose
        self.ident = threading.get_ident()
        self.queued = _QueuedCall(threading.get_native_id())
        self.over = threading.Event()
        self.beaten, self.waited = perf_counter(), self.queued.seconds()
        self.seen = _Sighting()
        self.longest = _Sighting()  # of this block
        self.known: set[CodeType] = set()

    def beat(self) -> None:
        """In the loop: it turns."""
        now, waited = perf_counter(), self.queued.seconds()
        held = now - self.beaten - (waited - self.waited)  # what it waited for a processor is the machine's fault
        seen = max(self.longest, self.seen, key=lambda s: s.seconds)
        self.beaten, self.waited, self.seen, self.longest = now, waited, _Sighting(), _Sighting()
        if seen.seconds >= self.limit_s / 2 and held > self.limit_s:
            code, line = seen.calls[0][0].f_code, seen.calls[0][1]
            if code not in self.known:
                self.known.add(code)
                self.tell(
                    f"the event loop was held up for {held:.1f} s by {code.co_qualname} "
                    f"({Path(code.co_filename).name}:{line}); every episode waits meanwhile: make it "
                    "await, or a sync tool, which runs in a thread"
                )
        if not self.over.is_set():
            self.loop.call_later(self.limit_s / 4, self.beat)

    def look(self) -> None:
        """In the thread."""
        while not self.over.wait(self.limit_s / 8):
            now, beaten = perf_counter(), self.beaten
            if now - beaten < self.limit_s / 2:
                continue
            frame = sys._current_frames().get(self.ident)
            calls = [] if frame is None else _calls(frame, self.whose)
            if self.beaten == beaten:  # the loop did not turn while it was looked at
                now -= self.queued.seconds()  # a short call lasts on a busy machine
                before = {id(one) for one, _ in self.seen.calls}  # which live, as they are held
                if kept := [call for call in calls if id(call[0]) in before]:
                    self.seen = _Sighting(kept, self.seen.first, now)
                else:
                    self.longest = max(self.longest, self.seen, key=lambda s: s.seconds)
                    self.seen = _Sighting(calls, now, now)


def _calls(innermost: FrameType, whose: tuple[str, ...] | None) -> list[tuple[FrameType, int]]:
    """Return the calls of the user's in what the loop runs, and the line that each is at, the innermost first."""
    found: list[tuple[FrameType, int]] = []
    at: FrameType | None = innermost
    while at is not None and not _is_loop(at):
        if _is_users(at, whose):
            found.append((at, at.f_lineno))
        elif whose is not None and not found and _package(at) == "agentrl":
            return []
        at = at.f_back
    return found


def _is_loop(frame: FrameType) -> bool:
    """Return True for the event loop itself: what called it is not run by it."""
    return frame.f_code.co_filename.endswith(("asyncio/base_events.py", "asyncio\\base_events.py"))


def _is_users(frame: FrameType, whose: tuple[str, ...] | None) -> bool:
    file = frame.f_code.co_filename
    if whose is not None:
        return file.startswith(whose)
    if _package(frame) in _OURS or (file.startswith(_PYTHON) and not file.startswith(_LIBRARIES)):
        return False
    if not file.startswith(_LIBRARIES):
        return True
    caller = frame.f_back  # an environment or tool that was installed is a library too
    return caller is not None and caller.f_globals.get("__name__") in _CALLERS


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class _QueuedCall:
    """Read how long a thread waited for a processor, where the system tells (Linux)."""

    def __init__(self, thread: int) -> None:
        self.file = Path(f"/proc/self/task/{thread}/schedstat")

    def seconds(self) -> float:
        try:
            return int(self.file.read_bytes().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0
