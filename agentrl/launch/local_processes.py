"""Ranks and servers as processes of this machine: the twin of a cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate

import anyio
from anyio import to_thread

from agentrl.errors import UserError
from agentrl.launch.child_process import ChildProcess
from agentrl.launch.run_process import Placement, RunPlan, Write, follow_polls, refuse_room

LOOPBACK = "127.0.0.1"


class LocalProcess:
    """A process of this machine. Rank 0 writes to the terminal by itself."""

    def __init__(self, name: str, folder: str, gpus: Sequence[str] = ()) -> None:
        self.name, self._folder, self._child = name, folder, ChildProcess()
        self._variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}

    async def locate(self) -> str:
        return LOOPBACK

    async def reserve_port(self) -> int:
        return self._child.reserve_port()

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        variables = {**environment, **self._variables}
        if problem := self._child.start(arguments, variables, self._folder, inherits=self.name == "rank 0"):
            raise UserError(f"{self.name} cannot be started: {problem}")

    async def follow(self, write: Write) -> int:
        return await follow_polls(partial(to_thread.run_sync, self._child.poll, abandon_on_cancel=True), write)

    async def send_signal(self, number: int) -> None:
        self._child.send_signal(number)

    async def kill(self) -> None:
        await to_thread.run_sync(self._child.kill)


@asynccontextmanager
async def place_locally(plan: RunPlan) -> AsyncIterator[Placement]:
    """Give every process of the run a place on this machine, and GPUs of its own where there are any.

    Raises:
        UserError: there are fewer GPUs than that takes.
    """
    gpus = await to_thread.run_sync(list_gpus)
    needs = plan.list_gpus()
    if (gpus or plan.require_gpus) and sum(needs) > len(gpus):
        raise refuse_room("local", f"{sum(needs)} GPUs", f"{len(gpus) or 'none'}")
    ends = list(accumulate(needs))
    shares = [gpus[end - need : end] for end, need in zip(ends, needs, strict=True)]
    processes = [LocalProcess(name, plan.folder, own) for name, own in zip(plan.list_names(), shares, strict=True)]
    try:
        yield Placement(processes)
    finally:
        with anyio.CancelScope(shield=True):
            for process in processes:
                await process.kill()


def list_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """List the GPUs that may be used here: those that the environment names, or those of the driver. Loads no torch."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [one.strip() for one in named.split(",") if one.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)
