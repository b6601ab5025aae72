"""Child processes of the tests."""

import signal
import time
from pathlib import Path


def heed_interrupts() -> None:
    """In the child: a job that runs in the background ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for_end(pid: int, timeout_s: float = 60.0) -> None:
    """Wait until a process has ended, collected or not. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while _runs(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} still runs")
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
