"""The lanes of a player's episodes as they cross to the run: ages in seconds, as two machines share no clock."""

from __future__ import annotations

import numpy as np

from agentrl.players.connection import Fields, Shown
from agentrl.runtime.lanes import IDLE, Lanes, Stretch, Track, merge_intervals

MOST = 256  # intervals of a lane that a frame tells
DIGITS = 4


def describe_stretch(stretch: Stretch, now: float) -> Fields:
    """Describe a stretch of a player's lanes as a frame's fields; of its episodes the one that ended last is told.

    A step waits for the last episode of a group: for the waited-for lane the others of the same stretch are not needed.
    """
    lanes = {
        owner: [round(now - moment, DIGITS) for pair in merge_intervals(intervals, MOST) for moment in pair]
        for owner, intervals in stretch.intervals.items()
        if owner != IDLE and intervals
    }
    told: Fields = {"lanes": lanes} if lanes else {}
    if stretch.tracks:
        last = max(stretch.tracks, key=lambda track: track.end)
        path = [[round(now - begin, DIGITS), owner] for begin, owner in last.path]
        told["track"] = [round(now - last.end, DIGITS), path]
    return told


def include_stretch(fields: Shown, lanes: Lanes) -> None:
    """Add what `describe_stretch` wrote to the run's lanes, in seconds of their clock: as old as it says, told now."""
    now = lanes.clock()
    for owner, ages in fields.get("lanes", {}).items():
        lanes.include(str(owner), now - np.asarray(ages, dtype=np.float64).reshape(-1, 2))
    if "track" in fields:
        end, path = fields["track"]
        lanes.include_track(Track(lanes, [(now - float(age), str(owner)) for age, owner in path], now - float(end)))
