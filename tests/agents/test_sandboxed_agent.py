"""A command in bubblewrap: what it reaches and reads, what it does not, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.sandboxed_agent import SandboxedAgent
from agentrl.errors import UserError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]
TRIES = """
import json, os, socket, sys, urllib.request
task = json.load(open(os.environ["AGENTRL_TASK"]))

def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        return True
    except OSError:
        return False

def reads(path):
    try:
        return open(path).read()
    except OSError:
        return None

said = {
    "question": task["messages"][0]["content"],
    "other_port": reaches(task["messages"][1]["content"]),
    "secret": reads(task["messages"][2]["content"]),
    "run": reads(task["messages"][3]["content"]),
    "processes": sorted(int(p) for p in os.listdir("/proc") if p.isdigit())[-1],
    "shadow": reads("/etc/shadow"),
    "environment": os.environ.get("SECRET_OF_THE_RUN"),
    "key": os.environ["OPENAI_API_KEY"],
}
try:
    open(sys.argv[0], "a")
    said["writes"] = True
except OSError:
    said["writes"] = False
for _ in range(3):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/say", json.dumps(said).encode())
    assert urllib.request.urlopen(request).read() == b"heard"
"""


class Heard(BaseHTTPRequestHandler):
    said: list[Any] = []

    def do_POST(self) -> None:
        self.said.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"heard")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Heard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def task(port: int, *contents: Any) -> AgentTask:
    return AgentTask([{"role": "user", "content": c} for c in contents], [], f"http://127.0.0.1:{port}/v1", "key")


def write(folder: Path, source: str) -> list[str]:
    folder.mkdir()
    (folder / "agent.py").write_text(source)
    return [sys.executable, str(folder / "agent.py")]


async def test_it_reaches_the_endpoint_and_reads_its_own_files_alone(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "s3cret")
    words = write(tmp_path / "project", TRIES)
    run = tmp_path / "project" / "runs"
    (tmp_path / "project" / "disk").mkdir()
    run.symlink_to("disk")
    for file in (tmp_path / "secret", run / "config.toml"):
        file.write_text("s3cret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        asked = task(port, "hi", other.getsockname()[1], str(tmp_path / "secret"), str(run / "config.toml"))
        async with SandboxedAgent(words, hidden=[str(run)]).open() as agent:
            assert await agent.run(asked) == AgentEnding()
    assert len(Heard.said) == 3
    said = Heard.said.pop()
    assert said.pop("processes") < 20
    assert said == {
        "question": "hi",
        "other_port": False,
        "secret": None,
        "run": None,
        "shadow": None,
        "environment": None,
        "key": "key",
        "writes": False,
    }


async def test_how_it_ends_is_told_as_without(tmp_path: Path) -> None:
    source = "import sys, os\nword = sys.argv[1]\n"
    source += "os.kill(os.getpid(), 9) if word == '9' else sys.exit(int(word) if word.isdigit() else word)"
    words = write(tmp_path / "project", source)
    for word, ending in (
        ("9", (True, "it was ended by SIGKILL")),
        ("oh no", (False, "exit status 1: oh no")),
        ("200", (False, "exit status 200")),
    ):
        async with SandboxedAgent([*words, word]).open() as agent:
            done = await agent.run(task(40009))
        assert (done.killed, done.error) == ending


async def test_who_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    words = write(tmp_path / "project", "import subprocess; subprocess.run(['sleep', '7654'])")

    def sleeping() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                found += [entry.name] * (b"sleep\x007654" in (entry / "cmdline").read_bytes())
            except OSError:
                continue
        return found

    handles = len(os.listdir("/proc/self/fd"))
    async with SandboxedAgent(words).open() as agent:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(agent.run, task(40009))
                while not sleeping():  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
            while sleeping():  # noqa: ASYNC110
                await anyio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= handles


async def test_what_cannot_be_seen_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="agent_readable: there is no '/nowhere'"):
        async with SandboxedAgent(["true"], readable=["/nowhere"]).open():
            raise AssertionError("it was opened")
