"""Activities of a run's processes: what each is at and waits for, looked at several times a second and summed by step.

Of a moment each thing that a process's episodes are at gets its part: a player with three episodes at the engine and
one in a tool spends 3/4 of that moment on the engine. So a process's seconds sum to those that it was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl.runtime.lanes import IDLE
from agentrl.runtime.stalls import Wait

MOST_PROCESSES = 128  # of a line; the others of a kind are one row
MOST_THINGS = 12  # that a process is at, of a line
LONGEST_NAME = 80  # characters
MORE = "other things"
OWN_WORK = {  # of the run's own process, by the lanes of `wait/`
    "learn": "learns",
    "sync": "new weights",
    "write": "writes",
    "checkpoint": "writes",
    "evaluate": "an evaluation",
    IDLE: "between steps",
}


class ActivityCount(NamedTuple):
    """The number of episodes, requests ... of a process that are at something, and how long the oldest has been."""

    number: float
    oldest: float  # seconds


@dataclass(frozen=True)
class ProcessActivity:
    """A process at one moment.

    Args:
        kind: rank, rollouts, server or player.
        doing: by what it is at, or waits for.
        groups: that a player was leased and has not answered.
        oldest_group: seconds since the oldest of those was leased.
        answered: groups that a player has answered, over the run.
    """

    kind: str
    name: str
    doing: Mapping[str, ActivityCount]
    groups: int = 0
    oldest_group: float = 0.0
    answered: int = 0


def sum_waits(waits: Iterable[Wait], queued: int, idle: str) -> dict[str, ActivityCount]:
    """Sum waits by what is waited for; ``queued`` episodes wait for a free slot. Without any of them it is ``idle``."""
    sums: dict[str, list[float]] = {}
    for what, seconds, _ in waits:
        if (own := sums.get(what)) is None:
            sums[what] = [1, seconds]
        else:
            own[0] += 1
            own[1] = max(own[1], seconds)
    doing = {what: ActivityCount(*own) for what, own in sums.items()}
    if queued:
        doing["a free slot"] = ActivityCount(queued, 0.0)
    return doing or {idle: ActivityCount(1, 0.0)}


@dataclass
class _Sum:
    """The seconds of a process since the last cut, and the groups that it has answered since."""

    seconds: dict[str, float] = field(default_factory=dict)
    answered: int = 0
    counted: int = 0  # groups, up to the last look

    def note_answered(self, answered: int) -> None:
        """Take in how many groups it has answered; fewer than before where it has joined anew."""
        self.answered += answered - (self.counted if answered >= self.counted else 0)
        self.counted = answered


class ActivityLog:
    """Seconds by process and by what it was at, between two cuts. ``look`` is called before each of them."""

    def __init__(self) -> None:
        self.look: Callable[[], None] = lambda: None
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._seconds = 0.0

    def add(self, activities: Sequence[ProcessActivity], seconds: float) -> None:
        """Charge so many seconds to what each process is at."""
        self._seconds += seconds
        for activity in activities:
            key = activity.kind, activity.name
            if (own := self._sums.get(key)) is None:
                own = self._sums[key] = _Sum()
            own.note_answered(activity.answered)
            total = sum(doing.number for doing in activity.doing.values()) or 1.0
            for what, doing in activity.doing.items():
                own.seconds[what] = own.seconds.get(what, 0.0) + seconds * doing.number / total

    def cut(self) -> dict[str, Any]:
        """Return the seconds since the last cut as plain data: ``processes`` are [kind, name, groups, seconds]."""
        self.look()
        rows = [
            [kind, _shorten(name), own.answered, dict(own.seconds)]
            for (kind, name), own in self._sums.items()
            if own.seconds
        ]
        line = {"seconds": round(self._seconds, 3), "processes": [_round(row) for row in _merge_rows(rows)]}
        self._sums = {key: _Sum(counted=own.counted) for key, own in self._sums.items() if own.seconds}
        self._seconds = 0.0
        return line


def _merge_rows(rows: list[list[Any]]) -> list[list[Any]]:
    """Return at most `MOST_PROCESSES` rows: those beyond are one for each kind, with the means of their seconds."""
    if len(rows) <= MOST_PROCESSES:
        return rows
    kinds = dict.fromkeys(row[0] for row in rows)
    kept, rest = rows[: MOST_PROCESSES - len(kinds)], rows[MOST_PROCESSES - len(kinds) :]
    alike = ([row for row in rest if row[0] == kind] for kind in kinds)
    return [*kept, *(_average(own) for own in alike if own)]


def _average(rows: list[list[Any]]) -> list[Any]:
    """Return one row of several of a kind, with the means of their seconds and the sum of their groups."""
    if len(rows) == 1:
        return rows[0]
    seconds: dict[str, float] = {}
    for row in rows:
        for what, own in row[3].items():
            seconds[what] = seconds.get(what, 0.0) + own / len(rows)
    return [rows[0][0], f"mean of {len(rows)} more", sum(row[2] for row in rows), seconds]


def _round(row: list[Any]) -> list[Any]:
    seconds: dict[str, float] = {}
    for number, (what, own) in enumerate(sorted(row[3].items(), key=lambda item: -item[1])):
        name = _shorten(what) if number < MOST_THINGS else MORE
        seconds[name] = seconds.get(name, 0.0) + own
    return [*row[:3], {what: round(own, 2) for what, own in seconds.items() if round(own, 2)}]


def describe_activities(activities: Sequence[ProcessActivity]) -> list[dict[str, Any]]:
    """Describe processes at one moment as plain data; of very many those that have waited longest."""

    def rank(activity: ProcessActivity) -> float:
        return max((doing.oldest for doing in activity.doing.values()), default=0.0)

    shown = list(activities)
    if len(shown) > MOST_PROCESSES:
        shown = sorted(shown, key=lambda a: (a.kind == "player", -rank(a)))[:MOST_PROCESSES]
    return [_describe(activity) for activity in shown]


def _describe(activity: ProcessActivity) -> dict[str, Any]:
    doing = sorted(activity.doing.items(), key=lambda item: -item[1].number)[:MOST_THINGS]
    described: dict[str, Any] = {
        "kind": activity.kind,
        "name": _shorten(activity.name),
        "doing": {_shorten(what): [own.number, round(own.oldest, 1)] for what, own in doing},
    }
    if activity.kind == "player":
        described |= {"groups": activity.groups, "oldest_group": round(activity.oldest_group, 1)}
    return described


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"
