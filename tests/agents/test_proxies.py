"""With a proxy in the environment, agents of all forms reach what is on the loopback."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.function_agent import FunctionAgent
from agentrl.agents.process_agent import ProcessAgent
from agentrl.agents.proxies import exempt_loopback, is_loopback
from agentrl.agents.service_agent import ServiceAgent

pytestmark = pytest.mark.anyio
NAMES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")


class Endpoint(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentTask]:
    """Have a proxy that answers nobody; the task's endpoint is on the loopback."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield AgentTask([], [], f"http://127.0.0.1:{server.server_port}/v1", "key")
    server.shutdown()
    server.server_close()


async def test_a_function_and_other_clients_in_it(task: AgentTask, tmp_path: Path) -> None:
    (tmp_path / "asking_agent.py").write_text(
        "import asyncio, urllib.request\n\n"
        "async def solve(task):\n    (await task.http.get(task.base_url)).raise_for_status()\n"
        "    await asyncio.to_thread(urllib.request.urlopen, task.base_url)\n"
    )
    async with FunctionAgent(f"{tmp_path}/asking_agent.py:solve", workers=1).open() as agent:
        assert await agent.run(task) == AgentEnding()


async def test_a_command(task: AgentTask) -> None:
    code = "import os, urllib.request; urllib.request.urlopen(os.environ['OPENAI_BASE_URL'])"
    async with ProcessAgent([sys.executable, "-c", code]).open() as agent:
        assert await agent.run(task) == AgentEnding()


async def test_a_service_on_the_loopback(task: AgentTask) -> None:
    async with ServiceAgent(task.base_url).open() as agent:
        assert await agent.run(task) == AgentEnding()


def test_what_is_exempt_already_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    for own, hosts in (("", "127.0.0.1,localhost"), ("a.b", "a.b,127.0.0.1,localhost"), ("*", "*")):
        monkeypatch.setenv("NO_PROXY", own)
        assert exempt_loopback() == {"NO_PROXY": hosts, "no_proxy": hosts}
    assert is_loopback("http://[::1]:80/run")
    assert not is_loopback("http://gpu-7/run")
