import gc
import subprocess
import sys

import pytest

from agentrl.runtime.memory import collect_garbage_seldom

SCRIPT = """
import resource, sys
from agentrl.runtime.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
[bytearray(20 << 20) for _ in range(5)]
before = faults()
for _ in range(20):
    [bytearray(b"1") * (20 << 20) for _ in range(5)]
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_large_temporaries_are_made_of_the_same_pages() -> None:
    assert faults("keep") * 5 < faults("give back")


THREADS = """
from concurrent.futures import ThreadPoolExecutor
from random import Random
from agentrl.runtime.memory import keep_freed_memory
keep_freed_memory()
sizes, stay = Random(0), []
def work():
    live = [bytearray(b"1") * (sizes.randint(1, 7) << 18) for _ in range(200)]
    stay.append(bytearray(b"1") * 4096)
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
pools = [ThreadPoolExecutor(1) for _ in range(6)]
taken = []
for pool in pools:
    pool.submit(work).result()
    taken.append(resident())
print(taken[-1] - taken[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_one_thread_freed_another_one_takes() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150 << 10  # kB: of 200 MiB in each of six threads


FREED = """
from agentrl.runtime.memory import keep_freed_memory, return_freed_memory
keep_freed_memory()
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
assert not return_freed_memory()
blocks = [bytearray(b"1") * (1 << 20) for _ in range(900)]
between = blocks[::9]
del blocks
before = resident()
given = return_freed_memory()
print(given, before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_is_free_between_used_blocks_is_given_back_where_it_is_much() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    given, kilobytes = done.stdout.split()
    assert given == "True"
    assert int(kilobytes) > 700 << 10


def test_garbage_is_sought_seldom_and_then_as_before() -> None:
    before = gc.get_threshold()
    with collect_garbage_seldom():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
