"""The C allocator's habits. Training makes and drops the same large temporaries at every operation: where each is
given back to the system and asked for again, up to a tenth of a small model's time goes into clearing pages.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
FROM_THE_HEAP = 32 << 20  # the most that glibc takes
KEPT_FREE = 1 << 30


def keep_freed_memory() -> bool:
    """Let the process keep up to a gigabyte that it freed, instead of giving it back; whether that could be set."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(
        mallopt(*setting) for setting in ((M_MMAP_THRESHOLD, FROM_THE_HEAP), (M_TRIM_THRESHOLD, KEPT_FREE))
    )
