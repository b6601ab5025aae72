"""Machines of episodes: a shell and files, contained."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from agentrl_tools.sandbox import launch
from agentrl_tools.sandbox.episode_vm import EpisodeVm
from agentrl_tools.shell import Files, Shell

from agentrl import InfraError, ToolError

pytestmark = pytest.mark.skipif(launch.explain_no_bubblewrap() is not None, reason=str(launch.explain_no_bubblewrap()))


async def used(kit: Files, *calls: tuple[str, dict[str, str]]) -> list[str]:
    async with kit.open() as shared:
        episode = kit.start_episode(shared)
        tools = {t.name: t for t in episode.tool_list}
        answers = []
        for name, arguments in calls:
            try:
                answers.append(await tools[name](**arguments))
            except ToolError as refusal:
                answers.append(f"error: {refusal}")
        await episode.close()
        return answers


def shell(*commands: str, **settings: Any) -> list[str]:
    return anyio.run(used, Shell(**settings), *(("shell", {"command": c}) for c in commands))


def test_files_and_commands_are_of_one_place() -> None:
    said = anyio.run(
        used,
        Shell(),
        ("write_file", {"path": "src/a.py", "text": "print('hé')"}),
        ("shell", {"command": "python3 src/a.py; ls src"}),
        ("read_file", {"path": "src/a.py"}),
        ("list_files", {"path": "src"}),
        ("read_file", {"path": "src/b.py"}),
    )
    assert said[:3] == ["wrote 11 characters to src/a.py", "hé\na.py", "print('hé')"]
    assert said[3].endswith("a.py")
    assert said[4] == "error: No such file or directory: src/b.py"


def test_a_command_that_fails_or_takes_too_long_is_the_models_to_read() -> None:
    said = shell("echo a; echo b >&2; exit 3", "sleep 30", "cat", "echo still here", timeout_s=0.5)
    assert said == ["error: a\nb\nexit code 3", "error: it took over 0.5 s and was stopped", "", "still here"]


@pytest.mark.parametrize("user", [None, launch.NOBODY] if os.getuid() == 0 else [None])
def test_what_a_shell_should_not_do_it_cannot(user: int | None) -> None:
    attacks = {
        "cat /etc/passwd /etc/shadow": lambda s: "root:" not in s,
        "ls /root /home/../root | head": lambda s: "ssh" not in s,
        "touch /usr/x || echo no": lambda s: "no" in s.split(),
        "echo x > /proc/sys/kernel/core_pattern || echo no": lambda s: "no" in s.split(),
        "cat /proc/1/environ || echo no": lambda s: "SECRET" not in s,
        "mount -t tmpfs x /mnt || echo no": lambda s: "no" in s.split(),
        "unshare -r id || echo no": lambda s: "no" in s.split(),
        "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53))' || echo no": lambda s: (
            "no" in s.split()
        ),
        "su -c id || echo no": lambda s: "uid=0" not in s,
        "chmod 4755 /bin/bash || echo no": lambda s: "no" in s.split(),
        "for i in 1 2 3; do head -c 30000000 /dev/zero > big$i; done; du -sm . | cut -f1": lambda s: int(s) <= 33,
        "f() { f | f & }; f; sleep 5": lambda s: "fork" in s or "stopped" in s or s == "",
        "yes": lambda s: len(s) < 70_000,
    }

    async def main() -> dict[str, str]:
        machine = EpisodeVm(launch.build_vm_launch(launch.SandboxLimits(disk_mb=32), user))
        bad = {}
        for command, contained in attacks.items():
            try:
                ran = await machine.exec(command, 2.0)
                said = f"{ran.stdout}{ran.stderr}"[-60_000:].strip()
            except (ToolError, InfraError) as error:
                said = str(error)
            if not _holds(contained, said):
                bad[command] = said[-300:]
        await machine.close()
        return bad

    assert anyio.run(main) == {}


def _holds(contained: Callable[[str], bool], said: str) -> bool:
    """Of all that was said, or of a number in its own line."""
    numbers = [line for line in said.splitlines() if line.isdigit()]
    return contained(numbers[-1] if numbers else said)


def test_a_machine_that_is_ended_from_inside_is_a_new_one_afterwards() -> None:
    ended, empty = shell("touch a; kill -9 -1", "ls")
    assert ended == "error: that ended the machine: its files and processes are gone"
    assert empty == ""


def test_each_episode_has_its_own_and_leaves_nothing() -> None:
    async def main() -> tuple[str, int]:
        kit = Shell()
        async with kit.open() as shared:
            one, other = kit.start_episode(shared), kit.start_episode(shared)
            await one.machine.write("secret", b"x")
            found = (await other.machine.exec("ls; ls /home /tmp", 5)).stdout
            assert one.machine.process is not None
            pid = one.machine.process.pid
            await one.close()
            await other.close()
            return found, pid

    found, pid = anyio.run(main)
    assert "secret" not in found
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_files_alone_have_no_shell() -> None:
    async def names(kit: Files) -> list[str]:
        async with kit.open() as shared:
            return sorted(t.name for t in kit.start_episode(shared).tool_list)

    assert anyio.run(names, Files()) == ["list_files", "read_file", "write_file"]
    assert anyio.run(names, Shell()) == ["list_files", "read_file", "shell", "write_file"]
