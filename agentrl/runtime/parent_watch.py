"""A watch on the processes that this one is of: it ends with its parent, and with the one that started both."""

from __future__ import annotations

import os
import threading
import time

OWNER = "AGENTRL_OWNER"  # the environment variable with the process that started this one, or its parent


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent is gone, or the owner: imports take long, and the parent
    may be gone before this is called.
    """
    watched = os.getppid(), int(os.environ.get(OWNER) or os.getppid())
    threading.Thread(target=_watch, args=watched, name="agentrl parent watch", daemon=True).start()


def _watch(parent: int, owner: int) -> None:
    while os.getppid() == parent and _is_running(owner):
        time.sleep(0.5)
    os._exit(1)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
