"""The sandbox as installed: every attack, as root and as an ordinary user; then what it is for."""

from __future__ import annotations

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
from agentrl_tools.sandbox import launch
from agentrl_tools.sandbox.fork_server_client import CodeResult, ForkServerClient, open_fork_server
from agentrl_tools.sandbox.inside import confinement

from agentrl import InfraError, UserError
from tests.helpers.attacks import ATTACKS, ENDLESS, PRELUDE

SYSTEM_PYTHON = "/usr/bin/python3"
ROOT = os.getuid() == 0
SETUPS: list[tuple[str, str, int | None]] = [("auto", sys.executable, None), ("bubblewrap", sys.executable, None)]
SETUPS += [("landlock", sys.executable, None), ("landlock", SYSTEM_PYTHON, None)]
SETUPS += [("bubblewrap", SYSTEM_PYTHON, launch.NOBODY), ("landlock", SYSTEM_PYTHON, launch.NOBODY)] if ROOT else []
TIMEOUT_S = 2.0


@asynccontextmanager
async def sandbox(
    kind: Any = "auto", python: str | None = None, user: int | None = None
) -> AsyncIterator[ForkServerClient]:
    if python is not None and shutil.which(python) is None:
        pytest.skip(f"there is no {python}")
    if kind == "bubblewrap" and (trouble := launch.explain_no_bubblewrap(user)) is not None:
        pytest.skip(trouble)
    async with open_fork_server(
        launch.choose_launch(kind, launch.SandboxLimits(disk_mb=32), (), python, user), limit=4
    ) as found:
        yield found


@pytest.fixture
def targets() -> Iterator[dict[str, Any]]:
    """Things outside that an attack would like to reach."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as tcp:
        Path(folder).chmod(0o755)
        path = f"{folder}/s"
        with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
            unix.bind(path)
            Path(path).chmod(0o777)
            unix.listen()
            abstract.bind(name := f"\0agentrl-{os.getpid()}")
            abstract.listen()
            host = str(Path(__file__).resolve())
            yield {"port": tcp.getsockname()[1], "unix": path, "abstract": name[1:], "host": host}


@pytest.mark.parametrize(
    ("kind", "python", "user"), [SETUPS[0], *(pytest.param(*s, marks=pytest.mark.slow) for s in SETUPS[1:])]
)
def test_every_attack_is_contained(
    kind: str, python: str, user: int | None, targets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    before = sorted(Path("/tmp").glob("x"))

    async def attack(place: ForkServerClient, name: str, code: str) -> str:
        began = perf_counter()
        found = await place.run(PRELUDE + code, session=None, timeout_s=TIMEOUT_S)
        if "ESCAPED" in found.output:
            return f"{name}: {found.output[-300:]}"
        if name in ENDLESS and found.status not in ("timeout", "died 24"):
            return f"{name}: {found}"[:300]
        late = perf_counter() - began > 30  # many at once, on few cores
        return f"{name}: it was not stopped" if late or len(found.output) > 70_000 else ""

    async def main() -> list[str]:
        async with sandbox(kind, python, user) as place:
            server = place.process
            programs = {**ENDLESS, **{n: c.format(**targets) for n, c in ATTACKS.items()}}
            told = await asyncio.gather(*(attack(place, n, c) for n, c in programs.items()))
            assert (await place.run("6 * 7", session=None, timeout_s=9)).output == "42\n"
            assert place.process is server, "the server had to be started again"
            return [t for t in told if t]

    assert anyio.run(main) == []
    assert sorted(Path("/tmp").glob("x")) == before


def test_there_are_as_many_attacks_as_promised() -> None:
    assert len(ATTACKS) + len(ENDLESS) >= 51


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
def test_it_runs_as_nobody_and_not_as_root(kind: str) -> None:
    async def main() -> CodeResult:
        async with sandbox(kind, SYSTEM_PYTHON) as place:
            return await place.run("import os; (os.getuid(), os.geteuid(), os.getgroups())", session=None, timeout_s=5)

    wanted = launch.NOBODY if ROOT else os.getuid()
    assert anyio.run(main).output.startswith(f"({wanted}, {wanted}, [")


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
        assert not launch.is_readable_by_nobody(f"{folder}/bin/python")
        assert anyio.run(main, f"{folder}/bin/python").output == f"(0, {[0] * 6})\n"


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
    launch.explain_no_bubblewrap.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(confinement, "get_landlock_version", lambda: 0)
    with pytest.raises(
        UserError, match=r"no sandbox to run code in: bubblewrap is not installed .*; this kernel has no"
    ):
        launch.choose_launch("auto", launch.SandboxLimits(), ())
    with pytest.raises(UserError, match=r"apt-get install bubblewrap\); --tool.python.sandbox monty needs neither"):
        launch.choose_launch("bubblewrap", launch.SandboxLimits(), ())
    launch.explain_no_bubblewrap.cache_clear()


def test_an_interpreter_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"tool.python.interpreter '/bin/false' is no Python that runs"):
        launch.choose_launch("auto", launch.SandboxLimits(), (), "/bin/false")


@pytest.mark.parametrize("given", [b"", b"{"])
def test_a_server_to_which_nobody_speaks_ends(given: bytes) -> None:
    """Its parent may die before it has said anything."""
    program = str(launch.INSIDE / "server.py")
    done = subprocess.run([sys.executable, "-I", program], input=given, capture_output=True, timeout=20, check=False)
    assert done.returncode == 1
