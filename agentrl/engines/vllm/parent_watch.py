"""A watch on the parent process: this process ends with the one that started it, whatever ends that one."""

from __future__ import annotations

import os
import threading
import time


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent is gone."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="agentrl parent watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
