"""A watch on commands: those that are left when a process is killed are killed too."""

from __future__ import annotations

import signal
import subprocess
import sys

from agentrl.agents.orphan_watch import OrphanWatch
from tests.helpers.processes import wait_for_end


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def test_those_that_are_watched_when_it_ends_are_killed_and_no_others() -> None:
    kept, left = start(), start()
    watch = OrphanWatch()
    with watch.watch(kept.pid):
        pass
    with watch.watch(left.pid):
        watch.close()
    assert left.wait(60) == -signal.SIGKILL
    assert kept.poll() is None
    kept.kill()
    kept.wait()


def test_a_watch_that_somebody_killed_ends_nothing() -> None:
    watch = OrphanWatch()
    watch._process.kill()
    wait_for_end(watch._process.pid)
    with watch.watch(1 << 22):
        pass
    watch.close()
