"""The users that the sandbox's processes have."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass
from typing import Any

NOBODY = 65534
# Of numbers that systemd's table of users leaves unused (1879048192 to 2147352575): no person, service or container.
# Where a container has no more than 65,536 users, of those that systemd gives services for as long as they run.
_RANGES = (range(1_879_048_192, 2_147_352_576), range(61_184, 65_520))
USERS = 1024  # of one server: a session has one for itself


@dataclass(frozen=True)
class UserLease:
    """Numbers of users that no other sandbox of this machine has, until it is closed."""

    users: range
    lock: int

    def close(self) -> None:
        os.close(self.lock)


def lease_users() -> UserLease | None:
    """Lease `USERS` numbers of users that exist here. ``None``: there are none, or all are taken."""
    for numbers in _RANGES:
        blocks = len(numbers) // USERS
        for block in random.Random(os.urandom(8)).sample(range(blocks), min(blocks, 16)):
            users = numbers[block * USERS : (block + 1) * USERS]
            if _is_mapped(users) and (lock := _lock(f"\0agentrl-users-{users[0]}")) is not None:
                return UserLease(users, lock)
    return None


def _is_mapped(users: range) -> bool:
    """Return whether these users exist in this user namespace."""
    try:
        with open("/proc/self/uid_map") as file:
            parts = [[int(word) for word in line.split()] for line in file]
    except OSError:
        return True
    return any(first <= users[0] and users[-1] < first + length for first, _, length in parts)


def _lock(name: str) -> int | None:
    """Take a name that goes with this process; ``None``: it is taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        try:
            lock.bind(name)
        except OSError:
            return None
        return lock.detach()


def is_root(user: int | None) -> bool:
    """Return whether a process of this user (``None``: ours) is root's."""
    return os.getuid() == 0 and user in (None, 0)


def get_user_inside(user: int | None) -> int | None:
    """Return the user that the process becomes, once inside."""
    return NOBODY if is_root(user) else None


def get_credentials(user: int | None) -> dict[str, Any]:
    """Return the arguments of a process that is to be this user's."""
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}
