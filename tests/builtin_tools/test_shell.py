"""Machines of episodes: a shell and files, contained."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from agentrl_tools.sandbox import bubblewrap, episode_vm, launch, vm_launch
from agentrl_tools.sandbox.episode_vm import EpisodeVm
from agentrl_tools.sandbox.users import NOBODY
from agentrl_tools.shell import Files, Shell

from agentrl import InfraError, ToolError
from tests.helpers.shell_attacks import HEAVY_SHELL_ATTACKS, QUICK_SHELL_ATTACKS, SOCKET

NO_BUBBLEWRAP = bubblewrap.explain_no_bubblewrap()
pytestmark = pytest.mark.skipif(NO_BUBBLEWRAP is not None, reason=str(NO_BUBBLEWRAP))


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
    said = shell("echo a; echo b >&2; exit 3", "sleep 30", "cat", "echo still here", timeout_s=3)
    assert said == ["error: a\nb\nexit code 3", "error: it took over 3 s and was stopped", "", "still here"]


USERS = [None, NOBODY] if os.getuid() == 0 else [None]


async def attack(user: int | None, attacks: dict[str, str]) -> dict[str, str]:
    """Run attacks in one machine, with an innocent call in another after each. Return those that got what they want."""
    start = vm_launch.build_vm_launch(launch.SandboxLimits(disk_mb=32, memory_mb=256, cpu_s=20), user)
    guilty, innocent = EpisodeVm(start), EpisodeVm(start)
    await innocent.write("mine", b"right")
    bad = {}
    for name, command in attacks.items():
        try:
            ran = await guilty.exec(f"W=ESC; W=${{W}}APED; export W\n{command}", 2.5)
            said = ran.stdout + ran.stderr
        except ToolError as error:  # an infrastructure fault is none of a command's doings
            said = str(error)
        if "ESCAPED" in said or len(said) > 140_000:
            bad[name] = said[-500:]
        beside = await innocent.exec("cat mine; echo $((6 * 7)) > new; cat new", 60.0)
        if (beside.exit_code, beside.stdout) != (0, "right42\n"):
            bad[f"{name}: beside it"] = str(beside)
        try:
            after = await guilty.exec("rm -rf /home/agent/* /tmp/* 2>/dev/null; echo $((6 * 7))", 60.0)
        except ToolError as error:
            bad[f"{name}: after it"] = str(error)
        else:
            if not after.stdout.endswith("42\n"):
                bad[f"{name}: after it"] = str(after)[:500]
    await guilty.close()
    await innocent.close()
    return bad


def test_what_a_shell_should_not_do_it_cannot_in_a_sample() -> None:
    sample = dict(list(QUICK_SHELL_ATTACKS.items())[::4])
    assert anyio.run(attack, USERS[-1], sample) == {}


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_what_a_shell_should_not_do_it_cannot(user: int | None) -> None:
    assert anyio.run(attack, user, QUICK_SHELL_ATTACKS) == {}


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_no_machine_starves_another(user: int | None) -> None:
    assert anyio.run(attack, user, HEAVY_SHELL_ATTACKS) == {}


def test_there_are_as_many_attacks_on_a_shell_as_promised() -> None:
    assert len(QUICK_SHELL_ATTACKS) + len(HEAVY_SHELL_ATTACKS) >= 40


async def _within(work: Callable[[EpisodeVm], Awaitable[Any]], user: int | None, **limits: int) -> Any:
    machine = EpisodeVm(vm_launch.build_vm_launch(launch.SandboxLimits(**limits), user))
    try:
        return await work(machine)
    finally:
        await machine.close()


def within(work: Callable[[EpisodeVm], Awaitable[Any]], user: int | None = None, **limits: int) -> Any:
    return anyio.run(partial(_within, work, user, **limits))


@pytest.mark.parametrize("user", USERS)
def test_a_path_may_be_anything_and_is_answered(user: int | None) -> None:
    paths = [
        "/dev/zero",
        "/dev/random",
        "/proc/1/environ",
        "/proc/self/mem",
        "/proc/kmsg",
        ".",
        "link",
        "loop",
        "f/x",
        "x" * 300,
    ]
    paths += ["socket", "a\0b", "a\ud800b", "a/" * 3000, "", "/proc/1/fd/0", "/proc/1/root/etc/passwd", "secret"]

    async def work(machine: EpisodeVm) -> list[str]:
        await machine.exec("ln -s /dev/zero link; ln -s loop loop; touch f secret; chmod 0 secret; " + SOCKET, 30)
        told = []
        for path in paths:
            for what in (machine.read(path), machine.write(path, b"x")):
                try:
                    told.append(f"read {await what!r}")
                except ToolError as error:
                    told.append(str(error))
        await machine.write("ok", b"yes")
        assert await machine.read("ok") == b"yes"
        return told

    told = within(work, user)
    assert [t for t in told if t.startswith("read ")] == []
    said = "\n".join(told)
    for sentence in (
        "a device, not a file: /dev/zero",
        "a folder, not a file: .",
        "a device, not a file: link",
        "Too many levels of symbolic links: loop",
        "a path cannot hold the character NUL: 'a\\x00b'",
        "a path cannot hold half of a character (a lone surrogate): 'a\\ud800b'",
        "File name too long",
        "Permission denied: secret",
    ):
        assert sentence in said, sentence
    assert "Traceback" not in said


def test_a_command_may_be_anything_and_is_answered() -> None:
    nul, half, long, empty, after = shell("echo a\0b", "echo \ud800", "x" * 200_000, "", "echo here")
    assert nul.startswith("error: a command cannot hold the character NUL")
    assert half.startswith("error: a command cannot hold half of a character")
    assert long == "error: the command has 200000 bytes; 100000 are the most: write a file and run that"
    assert (empty, after) == ("", "here")


@pytest.mark.parametrize("user", USERS)
def test_the_disk_is_bounded_in_size_and_in_files(user: int | None) -> None:
    async def work(machine: EpisodeVm) -> tuple[int, int, str]:
        await machine.exec("for i in 1 2 3; do head -c 6000000 /dev/zero > /tmp/big$i; done", 30)
        used = (await machine.exec("du -sb /tmp /home | awk '{n += $1} END {print n}'", 30)).stdout
        await machine.exec("rm /tmp/*; python3 -c \"for i in range(10000): open(f'f{i}', 'w')\"", 30)
        files = (await machine.exec("ls | wc -l", 30)).stdout
        try:
            await machine.write("more", b"x")
        except ToolError as error:
            return int(used), int(files), str(error)
        return int(used), int(files), ""

    used, files, told = within(work, user, disk_mb=8)
    assert used <= 9 << 20
    assert files < 8 * vm_launch.FILES_A_MB
    assert told == "No space left on device: more"


@pytest.mark.parametrize("user", USERS)
def test_all_processes_of_a_machine_have_its_memory_together(user: int | None) -> None:
    program = "python3 -c \"x = b'x' * (100 << 20); import time; time.sleep(20)\" &"

    async def work(machine: EpisodeVm) -> tuple[Any, str]:
        full = await machine.exec(f"{program * 8} sleep 100; echo survived", 120)
        return full, (await machine.exec("echo here", 30)).stdout

    full, after = within(work, user, memory_mb=256)
    assert (full.exit_code, full.stdout) == (-9, "")
    assert "over 256 MB of memory: all processes of the machine were ended" in full.stderr
    assert after == "here\n"


@pytest.mark.parametrize("user", USERS)
def test_what_is_left_running_is_paused_between_calls(user: int | None) -> None:
    async def work(machine: EpisodeVm) -> tuple[int, int]:
        await machine.exec("i=0; while true; do echo >> n; done & sleep 0.2", 30)
        first = int((await machine.exec("wc -l < n", 30)).stdout)
        await anyio.sleep(1.0)
        second = int((await machine.exec("sleep 0.2; wc -l < n", 30)).stdout)
        return first, second

    first, second = within(work, user)
    assert first < second < 4 * first + 2_000  # it goes on, but for the calls alone


def test_a_machine_outlives_what_ends_all_its_processes() -> None:
    ended, files = shell("touch a; kill -9 -1 2> /dev/null; kill -9 $$", "ls")
    assert ended == "error: exit code -9"
    assert files == "a"


@pytest.mark.parametrize("user", USERS)
def test_a_machine_that_is_stopped_or_ended_from_outside_is_renewed(
    user: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_vm, "GRACE_S", 0.5)

    async def work(machine: EpisodeVm) -> list[str]:
        told = []
        for number in (signal.SIGSTOP, signal.SIGKILL):
            await machine.write("f", b"x")
            assert machine.process is not None
            agent = int(_read_children(machine.process.pid).split()[0])
            os.kill(agent, number)
            try:
                await machine.exec("true", 1.0)
            except ToolError as error:
                told.append(str(error))
            told.append((await machine.exec("ls", 30)).stdout)
        return told

    gone = "its files and processes are gone, and there is a new one"
    assert within(work, user) == [f"that held up the machine: {gone}", "", f"that ended the machine: {gone}", ""]


def _read_children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_where_no_machine_starts_it_is_the_worlds_fault() -> None:
    async def work(machine: EpisodeVm) -> None:
        machine.launch = replace(machine.launch, command=["/bin/false"])
        with pytest.raises(InfraError, match="an episode's machine does not start"):
            await machine.exec("true", 1.0)

    within(work)


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user has no users to give")
def test_no_two_machines_have_one_user() -> None:
    async def main() -> list[str]:
        machines = [EpisodeVm(vm_launch.build_vm_launch(launch.SandboxLimits())) for _ in range(4)]
        users = [(await m.exec("id -u", 30)).stdout.strip() for m in machines]
        for machine in machines:
            await machine.close()
        return users

    users = anyio.run(main)
    assert len(set(users)) == 4
    assert not {"0", str(NOBODY)} & set(users)


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


@pytest.mark.parametrize("user", USERS)
def test_what_is_left_to_kill_all_that_comes_is_ended(user: int | None) -> None:
    async def work(machine: EpisodeVm) -> tuple[str, str]:
        killed = await machine.exec("setsid bash -c 'while true; do kill -9 -1; done' & sleep 100", 60)
        return killed.stderr, (await machine.exec("echo here", 60)).stdout

    told, after = within(work, user)
    assert "[killed, and all processes of the machine with it]" in told
    assert after == "here\n"


def test_a_run_says_at_its_start_which_walls_a_machine_has() -> None:
    async def say() -> str | None:
        kit = Shell(memory_mb=300, disk_mb=7)
        async with kit.open() as shared:
            return kit.describe_shared(shared)

    line = anyio.run(say)
    assert line is not None
    assert line.startswith("machine of shell and files: bubblewrap, own user")
    assert "7 MB of disk, 300 MB of memory" in line


def test_files_alone_have_no_shell() -> None:
    async def names(kit: Files) -> list[str]:
        async with kit.open() as shared:
            return sorted(t.name for t in kit.start_episode(shared).tool_list)

    assert anyio.run(names, Files()) == ["list_files", "read_file", "write_file"]
    assert anyio.run(names, Shell()) == ["list_files", "read_file", "shell", "write_file"]
