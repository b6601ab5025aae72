"""A thread computes, or waits for other processes, or does nothing with them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from agentrl.learner.whereabouts import IDLE, locate_thread

WAITING = """
import threading, time, sys, torch
from torch import distributed
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.whereabouts import locate_thread
store = distributed.FileStore(sys.argv[1], 2)
distributed.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
group, seen = ProcessGroup(int(sys.argv[2]), 2), []
if group.rank:
    time.sleep(1.5)
    group.all_gather(1)
else:
    thread = threading.Thread(target=group.all_gather, args=(0,))
    thread.start()
    time.sleep(0.7)
    print(locate_thread(thread.ident))
    thread.join()
distributed.destroy_process_group()
"""


def test_a_thread_in_a_collective_waits(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WAITING, str(tmp_path / "store")]
    other = subprocess.Popen([*words, "1"])
    done = subprocess.run([*words, "0"], capture_output=True, text=True, timeout=120, check=False)
    assert other.wait(60) == 0
    assert done.stdout.strip() == "waits", done.stderr[-500:]


def test_one_that_computes_is_at_a_line() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    place = locate_thread(thread.ident)
    go_on.set()
    thread.join()
    assert place.startswith("python3")
    assert place.endswith(" wait")
    assert locate_thread(None) == IDLE
