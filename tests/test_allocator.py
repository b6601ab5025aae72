import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from agentrl.allocator import keep_freed_memory
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_large_temporaries_are_made_of_the_same_pages() -> None:
    assert faults("keep") * 5 < faults("give back")
