"""Functions in other processes: cancelled with their caller, and begun from scripts of any kind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest
from agentrl_envs.workers import in_worker

SCRIPT = """
import anyio, os
from agentrl_envs.workers import in_worker

def main():
    print(anyio.run(in_worker, os.getpid) != os.getpid())

"""


def ran(script: Path) -> str:
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


async def test_another_process_which_ends_with_its_caller() -> None:
    assert await in_worker(os.getpid) != os.getpid()
    begun = time.monotonic()
    with pytest.raises(TimeoutError), anyio.fail_after(0.3):
        await in_worker(time.sleep, 60)
    assert time.monotonic() - begun < 30
    with pytest.raises(ZeroDivisionError):
        await in_worker(divmod, 1, 0)


def test_a_script_that_would_begin_again_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "main()\n")
    assert "put what it runs under `if __name__ == '__main__':`" in ran(script)
    script.write_text(SCRIPT + "if __name__ == '__main__':\n    main()\n")
    assert ran(script).startswith("True\n")  # asyncio may complain of a process that was killed


def test_the_command_line_is_no_such_script() -> None:
    words = ["-m", "agentrl", "train", "--env", "agentrl_envs.reasoning:ReasoningGym", "--env.name", "chain_sums"]
    code = [sys.executable, *words, "--steps", "1"]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
