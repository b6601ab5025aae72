"""The ends of processes: how they are told, and which of them the same command may not meet again."""

from __future__ import annotations

import signal

from agentrl.errors import UserError

_MISTAKE = UserError.exit_status


def describe_ending(status: int) -> str:
    """Describe how a process ended, as a sentence goes on: ``was killed by SIGKILL``."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def is_mistake(status: int) -> bool:
    """Return True for the end by a user's mistake, which starting it again does not mend."""
    return status == _MISTAKE


def as_exit_status(status: int) -> int:
    """Return the status that a shell gives: 128 + n after signal n."""
    return 128 - status if status < 0 else status
