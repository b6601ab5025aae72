"""Child processes of the tests."""

import signal


def heed_interrupts() -> None:
    """In the child: a job that runs in the background ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
