"""Episodes of a group that arrived and that nobody has looked into: what they say is read when it is asked for.

Whoever judges a group (the scheduler, dynamic sampling) asks for rewards and faults alone, which are in the header. The
first look at anything else reads the whole group, and from then on its episodes are plain trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.players.group_bytes import unpack_group, unpack_outcome
from agentrl.types import Group, Trajectory

_LATE = ("segments", "messages", "timings", "calls", "info", "threads")


class _Unread:
    """The bytes of a group, until they are read."""

    def __init__(self, header: Mapping[str, Any], body: bytes) -> None:
        self._header, self._body = header, body
        self._group: Group | None = None

    def read(self, member: int) -> Trajectory:
        if self._group is None:
            self._group = unpack_group(self._header, self._body)
        return self._group.trajectories[member]


def _make_reader(name: str) -> Callable[[Trajectory], Any]:
    def read(trajectory: Trajectory) -> Any:
        unread, member = _HOLDER.__get__(trajectory)
        whole = unread.read(member)
        object.__setattr__(trajectory, "__class__", Trajectory)
        for late in _LATE:
            object.__setattr__(trajectory, late, getattr(whole, late))
        return getattr(trajectory, name)

    return read


class _ArrivedTrajectory(Trajectory):
    """A trajectory of which the header was read."""

    __slots__ = ()
    __hash__ = Trajectory.__hash__

    def __eq__(self, other: object) -> bool:
        return bool(self.segments is not None and self == other)  # a plain trajectory by then


_HOLDER: Any = vars(Trajectory)["segments"]  # the slot that has the bytes until they are read
for _name in _LATE:
    setattr(_ArrivedTrajectory, _name, property(_make_reader(_name)))


def take_group(header: Mapping[str, Any], body: bytes) -> Group:
    """Return a group of which the header alone was read. Raises ValueError: it is none."""
    unread = _Unread(header, body)
    try:
        members = [_take_member(outcome, unread, i) for i, outcome in enumerate(header["members"])]
        return Group(header["task"], tuple(members))
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no group ({type(error).__name__}: {error})") from None


def _take_member(outcome: Mapping[str, Any], unread: _Unread, member: int) -> Trajectory:
    trajectory = object.__new__(_ArrivedTrajectory)
    for name, value in unpack_outcome(outcome).items():
        object.__setattr__(trajectory, name, value)
    _HOLDER.__set__(trajectory, (unread, member))
    return trajectory
