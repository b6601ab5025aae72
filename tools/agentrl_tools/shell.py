"""shell, files: a machine of its own for each episode, where the model may do as it likes."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self

from agentrl import Tool, ToolError, Toolset, tool
from agentrl.tools.toolset import fork_error
from agentrl_tools.sandbox import launch, vm_launch
from agentrl_tools.sandbox.episode_vm import EpisodeVm, ShellResult


class Files(Toolset):
    """Files in a machine of the episode's own.

    Args:
        timeout_s: of a command; the model reads that it took too long.
        memory_mb: address space of a process.
        disk_mb: of all files together; they are in memory.
        max_concurrency: calls that run at once.
    """

    def __init__(
        self, timeout_s: float = 10.0, memory_mb: int = 1024, disk_mb: int = 64, max_concurrency: int | None = None
    ) -> None:
        self.timeout_s, self.memory_mb, self.disk_mb = timeout_s, memory_mb, disk_mb
        self.max_concurrency = max_concurrency

    @asynccontextmanager
    async def open(self) -> AsyncIterator[launch.Launch]:
        limits = launch.SandboxLimits(memory_mb=self.memory_mb, disk_mb=self.disk_mb, cpu_s=600)
        vm = vm_launch.build_vm_launch(limits)
        probe = EpisodeVm(vm)
        try:
            await probe.start()
        finally:
            await probe.close()
        yield vm

    def describe_shared(self, shared: launch.Launch) -> str:
        return vm_launch.describe_walls(shared)

    def begin(self) -> None:
        self.machine = EpisodeVm(self.shared)

    def fork(self) -> Self:
        raise fork_error(self, "its files and processes are in a machine of the episode's own")

    async def close(self) -> None:
        await self.machine.close()

    @property
    def tool_list(self) -> Sequence[Tool]:
        longest_s = self.timeout_s + 20
        return [replace(t, timeout_s=longest_s, max_concurrency=self.max_concurrency) for t in super().tool_list]

    @tool
    async def read_file(self, path: str) -> str:
        """Read a text file.

        Args:
            path: where it is, such as "notes.txt".
        """
        return (await self.machine.read(path)).decode(errors="replace")

    @tool
    async def write_file(self, path: str, text: str) -> str:
        """Write a text file; one that is there is replaced.

        Args:
            path: where to, such as "src/main.py".
            text: all that it shall hold.
        """
        await self.machine.write(path, text.encode("utf-8", "replace"))
        return f"wrote {len(text)} characters to {path}"

    @tool
    async def list_files(self, path: str = ".") -> str:
        """The files in a folder.

        Args:
            path: the folder.
        """
        listing = await self.machine.exec(f"ls -lA -- {shlex.quote(path)}", self.timeout_s)
        if listing.exit_code:
            raise ToolError(listing.stderr.strip())
        return listing.stdout.strip()


class Shell(Files):
    """A shell, and files, in a machine of the episode's own."""

    @tool
    async def shell(self, command: str) -> str:
        """Run a shell command.

        Args:
            command: such as "ls | wc -l". There is no network.
        """
        return _format_output(await self.machine.exec(command, self.timeout_s), self.timeout_s)


def _format_output(ran: ShellResult, timeout_s: float) -> str:
    """Format a result for the model. Raises ToolError if the command failed."""
    text = ran.stdout + ran.stderr + (f"[{ran.cut} more bytes left out]\n" if ran.cut else "")
    if ran.exit_code is None:
        raise ToolError(f"{text}it took over {timeout_s:g} s and was stopped")
    if ran.exit_code:
        raise ToolError(f"{text}exit code {ran.exit_code}")
    return text.rstrip("\n")
