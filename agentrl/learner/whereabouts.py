"""The place of a thread: in a collective, where it waits for other processes, or at a line of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

IDLE, WAITS = "idle", "waits"
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


def locate_thread(thread: int | None) -> str:
    """Return ``waits`` for a thread inside a collective, ``idle`` for none, and else the innermost line of ours."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return IDLE
    if _is_in_collective(frame):
        return WAITS
    inner = frame
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return _describe(frame or inner)


def _is_in_collective(frame: FrameType | None) -> bool:
    """Return True where the frames of torch that are innermost have one of its collectives among them."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if "/distributed/" in frame.f_code.co_filename.removeprefix(_TORCH):
            return True
        frame = frame.f_back
    return False


def _describe(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
