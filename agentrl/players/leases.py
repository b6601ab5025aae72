"""The ledger of leases: each group is given to one player at a time, and answered exactly once.

added ---> waiting ---> leased to a player ---> answered          a second answer is nobody's, and dropped
              ^              |
              +--------------+  the player is lost, or hands it back: the same seeds go to another one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any


@dataclass(eq=False)
class Lease:
    """A group to be rolled out: what a player is told, and how many episodes it begins."""

    number: int
    terms: int
    episodes: int
    fields: Mapping[str, Any]
    since: float  # when it was added
    player: int | None = None  # that it is leased to
    leased_at: float = 0.0
    ended: int = 0  # of its episodes, as far as its player has told
    returned: int = 0  # times that it came back from a player that was lost


@dataclass
class LeaseBook:
    """All leases that are not answered, the oldest first."""

    leases: dict[int, Lease] = field(default_factory=dict)
    dropped: int = 0  # second answers
    _waiting: list[int] = field(default_factory=list)  # a heap of numbers; some are over
    _held: dict[int, set[int]] = field(default_factory=dict)  # by player
    _in_play: Counter[int] = field(default_factory=Counter)  # episodes, by player

    def add(self, lease: Lease) -> None:
        """Put a group in line."""
        self.leases[lease.number] = lease
        heappush(self._waiting, lease.number)

    def peek(self) -> Lease | None:
        """Return the oldest group that waits; None where none does."""
        while self._waiting:
            lease = self.leases.get(self._waiting[0])
            if lease is not None and lease.player is None:
                return lease
            heappop(self._waiting)
        return None

    def lend(self, lease: Lease, player: int, now: float = 0.0) -> None:
        """Lease the group that `peek` returned to a player."""
        lease.player, lease.ended, lease.leased_at = player, 0, now
        self._held.setdefault(player, set()).add(lease.number)
        self._in_play[player] += lease.episodes

    def note_ended(self, number: int, player: int, ended: int) -> None:
        """Take in how many episodes of a group its player has told to have ended."""
        lease = self.leases.get(number)
        if lease is not None and lease.player == player and 0 <= ended <= lease.episodes:
            self._in_play[player] -= ended - lease.ended
            lease.ended = ended

    def answer(self, number: int, player: int) -> bool:
        """Return True for the answer of a group that is leased to this player; it is over then."""
        lease = self.leases.get(number)
        if lease is None or lease.player != player:
            self.dropped += 1
            return False
        self.remove(number)
        return True

    def remove(self, number: int) -> int | None:
        """Forget a group; return the player that has it, if one does."""
        lease = self.leases.pop(number, None)
        if lease is None or lease.player is None:
            return None
        self._held[lease.player].discard(number)
        self._in_play[lease.player] -= lease.episodes - lease.ended
        return lease.player

    def give_back(self, player: int, *, lost: bool = True) -> list[Lease]:
        """Put all that a player has back in line, in its old place; return those groups.

        Args:
            lost: whether the player is, and has not left in order.
        """
        self._in_play.pop(player, None)
        returned = [self.leases[number] for number in sorted(self._held.pop(player, ()))]
        for lease in returned:
            lease.player, lease.returned = None, lease.returned + lost
            heappush(self._waiting, lease.number)
        return returned

    def list_waiting(self) -> list[Lease]:
        """List the groups that no player has."""
        return [lease for lease in self.leases.values() if lease.player is None]

    def count_groups(self, player: int) -> tuple[int, float]:
        """Count the groups that a player has; return when the oldest was leased too, 0 where there is none."""
        held = self._held.get(player, ())
        return len(held), min((self.leases[number].leased_at for number in held), default=0.0)

    def count_episodes(self, player: int) -> int:
        """Count the episodes that a player has begun, or is to begin, and not told to have ended."""
        return self._in_play[player]
