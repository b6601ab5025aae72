"""A process of the sandbox: started with the rights of its launch, and ended with its pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

from agentrl_tools.sandbox.launch import Launch, rights


async def started(launch: Launch, env: Mapping[str, str], limit: int) -> asyncio.subprocess.Process:
    """``limit``: bytes of a line that it may say."""
    return await asyncio.create_subprocess_exec(
        *launch.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        limit=limit,
        start_new_session=True,  # Ctrl-C is ours
        **rights(launch.user),
    )


def kill(process: asyncio.subprocess.Process) -> None:
    """Not Popen.kill, which would reap one that has just ended, behind the back of asyncio."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def last_words(process: asyncio.subprocess.Process) -> str:
    """What it wrote to stderr before it was killed, now."""
    assert process.stderr is not None
    kill(process)
    return (await process.stderr.read(2000)).decode(errors="replace").strip()


async def ended(process: asyncio.subprocess.Process) -> None:
    """Returns when it is gone."""
    kill(process)
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
    process._transport.close()  # type: ignore[attr-defined]  # its pipes, now and not when it is collected
