"""The ends of processes: how they are told, and which of them the same command may not meet again."""

from __future__ import annotations

import signal

from agentrl.errors import ProcessLostError, UserError
from agentrl.launch.run_process import MachineLost

Ending = int | MachineLost  # an exit status, -n after signal n; or the loss of the machine


def describe_ending(ending: Ending) -> str:
    """Describe how a process ended, as a sentence goes on: ``was killed by SIGKILL``."""
    if isinstance(ending, MachineLost):
        return f"is lost: {ending}"
    if ending < 0:
        return f"was killed by {signal.Signals(-ending).name}"
    return f"ended with status {ending}"


def is_kill(ending: Ending) -> bool:
    """Return True for a process that did not end by itself."""
    return isinstance(ending, MachineLost) or ending < 0


def is_mistake(ending: Ending) -> bool:
    """Return True for the end by a user's mistake, which starting it again does not mend."""
    return ending == UserError.exit_status


def compute_exit_status(ending: Ending) -> int:
    """Return the status that a shell gives: 128 + n after signal n."""
    if isinstance(ending, MachineLost):
        return ProcessLostError.exit_status
    return 128 - ending if ending < 0 else ending
