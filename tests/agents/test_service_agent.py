"""A service that plays: the task is posted, the answer is the end, and no answer is the world's fault."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.service_agent import ServiceAgent

pytestmark = pytest.mark.anyio
TASK = AgentTask([{"role": "user", "content": "hi"}], [], "http://h/v1", "key")


class Service(BaseHTTPRequestHandler):
    seen: list[Any] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(body)
        self.send_response(500 if self.path == "/broken" else 200)
        self.end_headers()
        self.wfile.write(b"the agent says why")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_the_task_is_posted_and_the_answer_is_the_end(url: str) -> None:
    async with ServiceAgent(f"{url}/run").open() as agent:
        assert await agent.run(TASK) == AgentEnding()
    assert Service.seen[-1] == TASK.to_json()
    async with ServiceAgent(f"{url}/broken").open() as agent:
        assert await agent.run(TASK) == AgentEnding(f"{url}/broken answered 500", "the agent says why")


async def test_no_answer_is_the_worlds_fault() -> None:
    async with ServiceAgent("http://127.0.0.1:9/run").open() as agent:
        ending = await agent.run(TASK)
    assert ending.killed
    assert ending.error == "http://127.0.0.1:9/run does not answer: ConnectError"
