"""Memory's habits. Training makes and drops the same large temporaries at every operation: where each is given back to
the system and asked for again, up to a tenth of a small model's time goes into clearing pages. And thousands of
episodes are many objects: where Python looks through all of them as often as by default, a quarter of the time is gone.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
FROM_THE_HEAP = 32 << 20  # the most that glibc takes
KEPT_FREE = 1 << 30
MUCH = 1 << 28  # what is free of the heap before it is worth the time to give it back
SELDOM = (50_000, 20, 100)  # allocations, and collections of the younger generation, between two of a generation


def keep_freed_memory() -> bool:
    """Let the process keep up to a gigabyte that it freed, and return True if that could be set.

    All threads take from one heap. By default each has its own, and what the engine's thread freed, the learner's could
    not use: with a model of a hundred million parameters gigabytes in each.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(
        mallopt(*setting)
        for setting in ((M_MMAP_THRESHOLD, FROM_THE_HEAP), (M_TRIM_THRESHOLD, KEPT_FREE), (M_ARENA_MAX, 1))
    )


class _HeapStatistics(ctypes.Structure):
    """glibc's ``mallinfo2``: ``fordblks`` are the bytes that are free."""

    NAMES = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def return_freed_memory() -> bool:
    """Give the system the pages of the heap that are free, where they are many; return True if any were given.

    Training and sampling take turns in blocks of different sizes: what the one leaves, the other fills only in part.
    """
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    read, trim = getattr(library, "mallinfo2", None), getattr(library, "malloc_trim", None)
    if read is None or trim is None:
        return False
    read.restype = _HeapStatistics
    return read().fordblks > MUCH and bool(trim(0))


@contextmanager
def collect_garbage_seldom() -> Iterator[None]:
    """Let Python collect garbage seldom, and never look at what was there before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
