"""A server that speaks OpenAI's chat completions, for the tests: real HTTP on loopback, scripted answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any] | tuple[int, str]  # a message, or a status and a body
Script = Callable[[dict[str, Any]], Answer]  # what was asked to the answer


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def called(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


class Endpoint(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script, models: list[str], key: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.models, self.key = script, models, key
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        if self._allowed():
            self._send(200, {"data": [{"id": m} for m in self.server.models]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        self.server.asked.append(asked)
        answer = self.server.script(asked)
        if isinstance(answer, tuple):
            self._send(answer[0], answer[1])
        else:
            self._send(200, {"choices": [{"message": answer, "finish_reason": answer.pop("finish", "stop")}]})

    def _allowed(self) -> bool:
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._send(401, "who are you?")
        return False

    def _send(self, status: int, what: Any) -> None:
        body = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002


@contextmanager
def serving(script: Script, models: tuple[str, ...] = ("m",), key: str | None = None) -> Iterator[Endpoint]:
    server = Endpoint(script, list(models), key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
