"""A process of the sandbox: started with the rights of its launch, and ended with its pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

from agentrl_tools.sandbox.launch import Launch
from agentrl_tools.sandbox.users import get_credentials


async def start_process(launch: Launch, env: Mapping[str, str], limit: int) -> asyncio.subprocess.Process:
    """Start the process of a launch. ``limit``: bytes of a line that it may write."""
    return await asyncio.create_subprocess_exec(
        *launch.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        limit=limit,
        start_new_session=True,  # Ctrl-C is ours
        **get_credentials(launch.user),
    )


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process; not by Popen.kill, which would reap one that has just ended behind asyncio's back."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def kill_and_read_stderr(process: asyncio.subprocess.Process) -> str:
    """Kill a process and return what it wrote to stderr."""
    assert process.stderr is not None
    _kill(process)
    return (await process.stderr.read(2000)).decode(errors="replace").strip()


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kill a process, wait until it is gone, and close its pipes."""
    _kill(process)
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
    process._transport.close()  # type: ignore[attr-defined]  # its pipes, now and not when it is collected
