"""Huge pages beneath what a process has made so far: a fork copies one entry for each, and not 512."""

from __future__ import annotations

import ctypes
import gc

_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_COLLAPSE = 25  # since Linux 6.1; before, nothing happens
_BITS = 21  # 2 MB


def collapse() -> int:
    """Collapse memory to huge pages and count them. Call it before ``gc.freeze``, which hides the objects."""
    found = {id(o) >> _BITS for o in gc.get_objects()}
    return sum(_LIBC.madvise(place << _BITS, 1 << _BITS, _MADV_COLLAPSE) == 0 for place in found)
