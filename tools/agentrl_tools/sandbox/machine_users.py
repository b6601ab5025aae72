"""Users for machines: each machine has one that no other process of this host has, where root can give one."""

from __future__ import annotations

import os

from agentrl_tools.sandbox.users import NOBODY, UserLease, lease_users


class MachineUsers:
    """Users that are leased as machines need them, and are kept for the next machine."""

    def __init__(self) -> None:
        self.leases: list[UserLease] = []
        self.free: list[int] = []
        self.owner = os.getpid()

    def take(self) -> int:
        """Take a user. `NOBODY`, which others share, where none can be had."""
        if self.owner != os.getpid():  # a fork: these are its parent's
            self.leases, self.free, self.owner = [], [], os.getpid()
        if not self.free:
            lease = lease_users()
            if lease is None:
                return NOBODY
            self.leases.append(lease)
            self.free = list(reversed(lease.users))
        return self.free.pop()

    def give_back(self, user: int) -> None:
        """Give a user back, once its machine is gone."""
        if user != NOBODY and self.owner == os.getpid():
            self.free.insert(0, user)


machine_users = MachineUsers()
