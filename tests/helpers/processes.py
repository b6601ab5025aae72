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
    while is_running(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} still runs")
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between the open and the read
        return False
