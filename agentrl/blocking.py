"""Is the event loop held up, and by whom? Code that does not await stops every episode, and the engine with them.

A thread looks whether the loop still turns. Where it does not, the loop's own stack says in which function it is: the
innermost one that belongs neither to Python, nor to a library, nor to agentrl.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType

LIMIT_S = 0.25
_OWN = str(Path(__file__).parent) + os.sep
_OTHERS = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        _OWN,
        "<",  # frozen modules
    }
)


@contextmanager
def blocking_told(
    tell: Callable[[str], None], limit_s: float = LIMIT_S, *, whose: tuple[str, ...] | None = None
) -> Iterator[None]:
    """Inside, ``tell`` is called, in the loop, for each function that held it up that long, once a function.

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
        self.over = threading.Event()
        self.beaten = perf_counter()
        self.culprit: tuple[CodeType, int] | None = None  # and its line, of the block that lasts
        self.known: set[CodeType] = set()

    def beat(self) -> None:
        """In the loop: it turns."""
        now, culprit = perf_counter(), self.culprit
        held, self.beaten, self.culprit = now - self.beaten, now, None
        if culprit is not None and culprit[0] not in self.known:
            code, line = culprit
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
        while not self.over.wait(self.limit_s / 4):
            if perf_counter() - self.beaten > self.limit_s and self.culprit is None:
                frame = sys._current_frames().get(self.ident)
                self.culprit = _culprit(frame, self.whose) if frame is not None else None


def _culprit(frame: FrameType, whose: tuple[str, ...] | None) -> tuple[CodeType, int] | None:
    """The innermost function of a user's, and its line; where there is none, the innermost of all, or nobody."""
    found = _innermost(frame, whose) or (frame if whose is None else None)
    return None if found is None else (found.f_code, found.f_lineno)


def _innermost(frame: FrameType, whose: tuple[str, ...] | None) -> FrameType | None:
    at: FrameType | None = frame
    while at is not None:
        file = at.f_code.co_filename
        if file.startswith(whose) if whose is not None else not file.startswith(_OTHERS):
            return at
        if whose is not None and file.startswith(_OWN):
            return None
        at = at.f_back
    return None
