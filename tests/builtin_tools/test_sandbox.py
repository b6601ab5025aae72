"""The sandbox as installed: every attack, as root and as an ordinary user; then what it is for."""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import pytest
from agentrl_tools.sandbox import bubblewrap, interpreter, launch, users
from agentrl_tools.sandbox.fork_server_client import CodeResult, ForkServerClient, open_fork_server
from agentrl_tools.sandbox.inside import confinement, folders
from agentrl_tools.sandbox.session import Session

from agentrl import InfraError, ToolError, UserError
from tests.attacks import ENDLESS, build_programs

SYSTEM_PYTHON = "/usr/bin/python3"
ROOT = os.getuid() == 0
NEWEST = launch.NEWEST_LANDLOCK
# The sandbox, an interpreter, a user, the newest landlock, and whether sessions have mounts of their own.
Setup = tuple[Any, str, int | None, int, bool]
SETUPS: list[Setup] = [("auto", sys.executable, None, NEWEST, True)]
for _user in (None, users.NOBODY) if ROOT else (None,):
    SETUPS += [("bubblewrap", SYSTEM_PYTHON, _user, abi, True) for abi in (NEWEST, 5, 3, 0)]
    SETUPS += [("landlock", SYSTEM_PYTHON, _user, abi, True) for abi in (NEWEST, 5, 2)]
    SETUPS += [("bubblewrap", SYSTEM_PYTHON, _user, NEWEST, False), ("landlock", SYSTEM_PYTHON, _user, 2, False)]
SETUPS += [("landlock", sys.executable, None, NEWEST, True)]
CANARY = f"CANARY-{os.urandom(16).hex()}"
TIMEOUT_S = 1.0


@asynccontextmanager
async def sandbox(
    kind: Any = "auto",
    python: str | None = None,
    user: int | None = None,
    landlock_abi: int = NEWEST,
    own_mounts: bool = True,
    limit: int = 4,
) -> AsyncIterator[ForkServerClient]:
    if python is not None and shutil.which(python) is None:
        pytest.skip(f"there is no {python}")
    if kind == "bubblewrap" and (trouble := bubblewrap.explain_no_bubblewrap(user)) is not None:
        pytest.skip(trouble)
    limits = launch.SandboxLimits(disk_mb=32)
    start = launch.choose_launch(kind, limits, (), python, user, landlock_abi=landlock_abi, own_mounts=own_mounts)
    async with open_fork_server(start, limit=limit) as found:
        yield found


@pytest.fixture
def targets() -> Iterator[dict[str, Any]]:
    """Things outside that an attack would like to reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.create_server(("127.0.0.1", 0)) as tcp:
        Path(folder).chmod(0o755)
        path = f"{folder}/s"
        with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
            unix.bind(path)
            Path(path).chmod(0o777)
            unix.listen()
            abstract.bind(name := f"\0agentrl-{os.getpid()}")
            abstract.listen()
            host = str(Path(__file__).resolve())
            Path(file := f"{folder}/precious").write_text("precious")
            Path(file).chmod(0o666)
            Path(folder).chmod(0o777)
            yield {"port": tcp.getsockname()[1], "unix": path, "abstract": name[1:], "host": host, "file": file}
            assert sorted(os.listdir(folder)) == ["precious", "s"]
            assert Path(file).read_text() == "precious"


MARKED = [pytest.param(s, marks=pytest.mark.long if n % 3 else pytest.mark.slow) for n, s in enumerate(SETUPS[1:])]


@pytest.mark.parametrize("setup", [SETUPS[0], *MARKED], ids=str)
def test_every_attack_is_contained(setup: Setup, targets: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After each, an innocent call and an innocent write are right; their text is what the attacks look for."""
    monkeypatch.setenv("SECRET_KEY", CANARY)
    before = sorted(Path("/tmp").glob("x"))
    innocent = f"n = globals().get('n', 0) + 1; text = {CANARY!r} + '.' * (1 << 20)\n"
    innocent += "with open('f', 'w') as f: f.write(text)\nprint(n, open('f').read() == text, text[:39])"

    async def attack(place: ForkServerClient, victim: Session, name: str, code: str, state: list[int]) -> str:
        began = perf_counter()
        found = await place.run(code, timeout_s=TIMEOUT_S)
        took = perf_counter() - began
        right = await victim.run(innocent, timeout_s=60)
        state[0] += 1
        if right.output != f"{state[0]} True {CANARY}\n":
            return f"after {name}: {right}"[:300]
        if "ESCAPED" in found.output:
            return f"{name}: {found.output[-300:]}"
        if name in ENDLESS and found.status not in ("timeout", "died 24"):
            return f"{name}: {found}"[:300]
        late = took > 30  # many at once, on few cores
        return f"{name}: it was not stopped" if late or len(found.output) > 70_000 else ""

    async def main() -> list[str]:
        async with sandbox(*setup, limit=8) as place:
            server = place.process
            programs = iter(build_programs(targets).items())
            told: list[str] = []

            async def work(victim: Session) -> None:
                state = [0]
                for name, code in programs:
                    told.append(await attack(place, victim, name, code, state))

            victims = [place.session() for _ in range(6)]
            await asyncio.gather(*(work(victim) for victim in victims))
            assert (await place.run("6 * 7", timeout_s=9)).output == "42\n"
            assert place.process is server, "the server had to be started again"
            return [t for t in told if t]

    assert anyio.run(main) == []
    assert sorted(Path("/tmp").glob("x")) == before


def test_there_are_as_many_attacks_as_promised(targets: dict[str, Any]) -> None:
    assert len(build_programs(targets)) >= 120


@pytest.mark.skipif(not ROOT, reason="an ordinary user has no users to give")
@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
def test_each_session_has_a_user_of_its_own(kind: str) -> None:
    async def main() -> list[str]:
        async with sandbox(kind, SYSTEM_PYTHON) as place:
            codes = ["import os; (os.getresuid(), os.getresgid(), os.getgroups())"] * 3
            return [(await place.run(c, session=str(n), timeout_s=20)).output for n, c in enumerate(codes)]

    told = [ast.literal_eval(output) for output in anyio.run(main)]
    assert all(len({*user, *group}) == 1 and not groups for user, group, groups in told)
    assert len({user for user, _, _ in told}) == 3
    assert all(user[0] in numbers for user, _, _ in told for numbers in [range(61_184, 2_147_352_576)])


@pytest.mark.skipif(not ROOT, reason="an ordinary user reads its own Python")
def test_where_nobody_cannot_read_the_interpreter_root_stays_without_its_capabilities() -> None:
    held = "import ctypes, os\nheld = (ctypes.c_uint32 * 6)()\n"
    held += "ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), held)\n(os.getuid(), list(held))"

    async def main(python: str) -> CodeResult:
        async with sandbox("landlock", python) as place:
            return await place.run(held, session=None, timeout_s=5)

    with tempfile.TemporaryDirectory() as folder:  # of mode 0700, as root's home is
        Path(folder).chmod(0o700)
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", "--copies", folder], check=True)
        assert not interpreter.is_readable_by_nobody(f"{folder}/bin/python")
        held_by = anyio.run(main, f"{folder}/bin/python").output
        assert held_by.endswith(f", {[0] * 6})\n")
        assert not held_by.startswith("(0,")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
def test_our_own_packages_which_know_answers_are_not_there(kind: str) -> None:
    async def main(python: str) -> list[str]:
        async with sandbox(kind, python) as place:
            codes = ["import other; other.answer", "import agentrl_envs; agentrl_envs.answer"]
            return [(await place.run(code, timeout_s=20)).output.splitlines()[-1] for code in codes]

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", folder], check=True)
        (packages,) = Path(folder).glob("lib/python3*/site-packages")
        for name in ("other", "agentrl_envs"):
            (packages / name).mkdir()
            (packages / name / "__init__.py").write_text("answer = 42")
        Path(folder).chmod(0o755)
        seen, hidden = anyio.run(main, f"{folder}/bin/python")
    assert seen == "42"
    assert hidden.startswith(("AttributeError", "PermissionError"))


def test_asyncio_works_inside() -> None:
    async def main() -> CodeResult:
        async with sandbox() as place:
            code = "import asyncio\nasync def f(): await asyncio.sleep(0); return 4\nasyncio.run(f())"
            return await place.run(code, session=None, timeout_s=20)

    assert anyio.run(main).output == "4\n"


def test_a_session_keeps_its_variables_and_its_files_from_others() -> None:
    async def main() -> list[str]:
        async with sandbox() as place:
            codes = [("a", "x = 1; open('f', 'w').write('a')"), ("b", "'x' in globals()"), ("a", "x + 1")]
            codes += [("b", "import os; os.listdir('.')"), ("a", "open('f').read()")]
            found = [(await place.run(c, session=s, timeout_s=5)).output for s, c in codes]
            await place.end("a")
            return [*found, (await place.run("'x' in globals()", session="a", timeout_s=5)).output]

    assert anyio.run(main) == ["1\n", "False\n", "2\n", "[]\n", "'a'\n", "False\n"]


def test_threads_that_were_left_behind_do_not_go_on() -> None:
    count = (
        "import threading\nn = [0]\ndef f():\n    while True: n[0] += 1\n"
        "threading.Thread(target=f, daemon=True).start()"
    )

    async def main() -> tuple[int, int]:
        async with sandbox() as place:
            await place.run(count, session="a", timeout_s=5)
            await asyncio.sleep(0.05)
            first = int((await place.run("n[0]", session="a", timeout_s=5)).output)
            await asyncio.sleep(0.5)
            return first, int((await place.run("n[0]", session="a", timeout_s=5)).output)

    first, second = anyio.run(main)
    assert second < 5 * first + 5_000_000


def test_what_comes_back_is_what_was_printed_and_the_last_value() -> None:
    async def main() -> list[CodeResult]:
        async with sandbox() as place:
            codes = ["print('a')\n1 + 1", "x = 1", "None", "1 /", "import sys; sys.exit(3)", "print('x' * 100_000)"]
            return [await place.run(c, session=None, timeout_s=5) for c in codes]

    two, nothing, none, wrong, left, long = anyio.run(main)
    assert (two.output, nothing.output, none.output) == ("a\n2\n", "", "")
    assert wrong.status == "raised"
    assert wrong.output.endswith("SyntaxError: invalid syntax\n")
    assert "server" not in wrong.output
    assert left.status == "raised"
    assert (len(long.output), long.cut) == (65_536, 100_001 - 65_536)


def test_a_server_that_is_killed_costs_the_calls_in_flight_and_is_started_again() -> None:
    async def main() -> tuple[list[Any], CodeResult, CodeResult]:
        async with sandbox() as place:
            await place.run("x = 1", session="a", timeout_s=5)
            calls = [
                asyncio.create_task(place.run("import time; time.sleep(9)", session=None, timeout_s=9)) for _ in "ab"
            ]
            await asyncio.sleep(0.3)
            assert place.process is not None
            place.process.kill()
            told = await asyncio.gather(*calls, return_exceptions=True)
            lost = await place.run("x", session="a", timeout_s=5, old=1)
            return told, lost, await place.run("2", session=None, timeout_s=5)

    told, lost, after = anyio.run(main)
    assert [type(t) for t in told] == [InfraError] * 2
    assert "sandbox ended in mid-call" in str(told[0])
    assert (lost.status, after.output) == ("lost", "2\n")


def test_a_cancelled_call_ends_what_it_began() -> None:
    async def main() -> int:
        async with sandbox() as place:
            call = asyncio.create_task(place.run("while True: pass", session=None, timeout_s=60))
            await asyncio.sleep(0.3)
            call.cancel()
            await asyncio.wait({call})
            assert (await place.run("3", session=None, timeout_s=5)).output == "3\n"
            return len(place.waiting)

    assert anyio.run(main) == 0


def test_nothing_is_left_running() -> None:
    async def main() -> int:
        async with sandbox() as place:
            assert place.process is not None
            await place.run("x = 1", session="a", timeout_s=5)
            return place.process.pid

    pid = anyio.run(main)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_ends_with_its_parent() -> None:
    program = (
        "import asyncio, os, sys\n"
        "from agentrl_tools.sandbox import fork_server_client, launch\n"
        "async def main():\n"
        "    start = launch.choose_launch('auto', launch.SandboxLimits(), ())\n"
        "    async with fork_server_client.open_fork_server(start) as place:\n"
        "        print(place.process.pid, flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        subprocess.run(["sleep", "0.05"], check=True)
    pytest.fail(f"process {pid} goes on")


def test_where_there_is_no_sandbox_it_refuses_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.explain_no_bubblewrap.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(confinement, "get_landlock_version", lambda: 0)
    with pytest.raises(
        UserError, match=r"no sandbox to run code in: bubblewrap is not installed .*; this kernel has no"
    ):
        launch.choose_launch("auto", launch.SandboxLimits(), ())
    with pytest.raises(UserError, match=r"apt-get install bubblewrap\); --tool.python.sandbox monty needs neither"):
        launch.choose_launch("bubblewrap", launch.SandboxLimits(), ())
    bubblewrap.explain_no_bubblewrap.cache_clear()


def test_an_interpreter_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"tool.python.interpreter '/bin/false' is no Python that runs"):
        launch.choose_launch("auto", launch.SandboxLimits(), (), "/bin/false")


@pytest.mark.parametrize("given", [b"", b"{"])
def test_a_server_to_which_nobody_speaks_ends(given: bytes) -> None:
    """Its parent may die before it has said anything."""
    program = str(bubblewrap.INSIDE / "server.py")
    done = subprocess.run([sys.executable, "-I", program], input=given, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize(("kept", "most"), [(90, 128), pytest.param(400, None, marks=pytest.mark.slow)])
def test_many_sessions_are_kept_and_each_answers_with_its_own_name(kept: int, most: int | None) -> None:
    """One request is told so where descriptors do not suffice, and the server goes on."""
    program = f"""
import asyncio, resource
if {most}: resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))
import agentrl_tools.sandbox as sandbox
from agentrl import InfraError

async def name(session, number):
    try:
        return (await session.run(f"name = globals().get('name', {{number}}); name", timeout_s=60)).output.strip()
    except InfraError as error:
        return str(error)

async def main():
    async with sandbox.open(max_concurrency=8) as box:
        sessions, server = [box.session() for _ in range({kept})], box.process
        for _ in range(2):
            answers = await asyncio.gather(*(name(s, n) for n, s in enumerate(sessions)))
            right = sum(answer == str(n) for n, answer in enumerate(answers))
        others = {{answer[:40] for answer in answers if not answer.isdigit()}}
        await sessions[0].close()
        again = await box.run("6 * 7", timeout_s=60)
        print(right, others, again.output.strip(), box.process is server)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    right, rest = done.stdout.split(" ", 1)
    if most is None:
        assert (int(right), rest) == (kept, "set() 42 True\n")
    else:
        assert 20 < int(right) < kept
        assert "the sandbox cannot run this" in rest
        assert rest.endswith("42 True\n")


def test_files_go_in_and_out_of_a_session() -> None:
    data = bytes(range(256)) * 300

    async def main() -> None:
        async with sandbox() as place, place.session() as session:
            await session.files.write("a/b.bin", data)
            assert (await session.run("import os; os.path.getsize('a/b.bin')")).output == f"{len(data)}\n"
            assert await session.files.read("a/b.bin") == data
            await session.files.write("e", "")
            assert await session.files.read("e") == b""
            with pytest.raises(ToolError, match="No such file or directory: 'nope'"):
                await session.files.read("nope")

    anyio.run(main)


def test_a_folder_that_a_stranger_filled_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    at = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("f", dir_fd=at)
    for _ in range(1200):  # deeper than a path may be long
        deeper = os.open("f", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = deeper
        os.mkdir("f", dir_fd=at)
    os.close(at)
    for mode in (0o300, 0o000):
        (folder / str(mode)).mkdir()
        (folder / str(mode) / "x").write_text("x")
        (folder / str(mode)).chmod(mode)
    assert folders.measure(str(folder), 100)[1] > 100
    folders.remove(str(folder))
    assert not folder.exists()


def test_what_a_call_left_behind_does_nothing_until_the_next() -> None:
    leave = "import signal, threading, time\ntimes = []\ndef f():\n"
    leave += "    while True: times.append(time.time()); time.sleep(0.01)\n"
    leave += "threading.Thread(target=f, daemon=True).start()\n"
    leave += "signal.signal(signal.SIGALRM, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
    look = "max(b - a for a, b in zip(times, [*times[1:], time.time()])) > 1"

    async def main() -> list[str]:
        async with sandbox() as place, place.session() as session:
            await session.run(leave)
            await asyncio.sleep(1.5)
            return [(await session.run(look)).output]

    assert anyio.run(main) == ["True\n"]
