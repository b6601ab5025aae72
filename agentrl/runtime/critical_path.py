"""The waited-for lane: at each moment the one thing without which a step cannot go on. It does not overlap.

A step's own work is waited for as it is done: learning, weights, writing. While it waits for episodes, it waits for the
last of them to end, and for what that one was at; before that one began, for the last that had ended by then and made
room for it; and so on back to where the waiting began. Nothing else could have been faster without the step being as
slow.

    episode 1   |generate|tool/price|generate|
    episode 2                                |generate|reward|      begun when 1 had ended
    waited for  |generate|tool/price|generate|generate|reward|
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from agentrl.runtime.lanes import IDLE, Piece, Stretch, Track

EPISODES = "episodes"  # the mark of a step that waits for those
QUEUE = "queue"  # no episode had ended by then: the first were being made, or the event loop was at others


def find_critical_path(stretch: Stretch, marks: Sequence[tuple[float, str]]) -> list[Piece]:
    """Return what a step waited for in each moment of a stretch, in order and without gaps.

    Args:
        marks: since when it was at what, in order; `EPISODES` where it waited for those that are played.
    """
    begins = [(max(begin, stretch.begin), owner) for begin, owner in marks]
    if not begins or begins[0][0] > stretch.begin:
        begins.insert(0, (stretch.begin, IDLE))
    ends = [*(begin for begin, _ in begins[1:]), stretch.end]
    found: list[Piece] = []
    for (begin, owner), end in zip(begins, ends, strict=True):
        if end > begin:
            found += trace_critical_path(stretch.tracks, begin, end) if owner == EPISODES else [(begin, end, owner)]
    return _joined(found)


def trace_critical_path(tracks: Sequence[Track], begin: float, end: float) -> list[Piece]:
    """Return what was waited for from `begin` to `end`, for the episode that ended last and those it waited for."""
    order = sorted((t for t in tracks if t.path), key=lambda t: t.end)
    ends = [t.end for t in order]
    found: list[Piece] = []
    now, last = end, len(order)
    while now > begin:
        last = bisect_right(ends, now, 0, last) - 1
        if last < 0 or ends[last] <= begin:
            found.append((begin, now, QUEUE))
            break
        if ends[last] < now:
            found.append((ends[last], now, QUEUE))
        own = [(max(a, begin), b, owner) for a, b, owner in order[last].pieces() if b > begin and b > a]
        found += reversed(own)
        now = min(now, max(order[last].path[0][0], begin))
    return found[::-1]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of one owner."""
    found: list[Piece] = []
    for begin, end, owner in pieces:
        if found and found[-1][2] == owner:
            found[-1] = (found[-1][0], end, owner)
        else:
            found.append((begin, end, owner))
    return found


def sum_by_owner(pieces: Sequence[Piece]) -> dict[str, float]:
    """Sum the lengths of pieces by owner."""
    found: dict[str, float] = {}
    for begin, end, owner in pieces:
        found[owner] = found.get(owner, 0.0) + end - begin
    return found
