"""What E2B's client library talks to, for the tests: its HTTP API and a sandbox's, in a folder of this machine."""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "e2b_" + "0" * 40


class Service(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.wanted: list[dict[str, Any]] = []
        self.running: set[str] = set()
        self.most = 0
        self.refusing = 0  # starts that fail with 500
        self.late_s = 0.0  # beyond a command's deadline, until it is ended
        self.gate = threading.Event()  # starts wait for it
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_POST(self) -> None:
        body = self.body()
        match self.path.partition("?")[0]:
            case "/v2/sandboxes":
                self.start(json.loads(body))
            case "/files":
                self.write_file(body)
            case "/process.Process/Start":
                self.run(json.loads(body[5:]))
            case _:
                self.answer(404, {"code": "not_found", "message": self.path})

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def do_GET(self) -> None:
        if self.path == "/health":
            return self.answer(204 if self.server.running else 502, {"message": "sandbox was not found"})
        path = self.file()
        if not self.server.running:
            return self.answer(502, {"message": "The sandbox was not found"})
        if not path.is_file():
            return self.answer(404, {"code": 404, "message": f"path '{path}' does not exist"})
        self.send_response(200)
        self.send_header("content-length", str(path.stat().st_size))
        self.end_headers()
        self.wfile.write(path.read_bytes())
        return None

    def do_DELETE(self) -> None:
        self.server.running.discard(self.path.rpartition("/")[2])
        self.send_response(204)
        self.end_headers()

    def start(self, wanted: dict[str, Any]) -> None:
        self.server.wanted.append(wanted)
        self.server.gate.wait(10)
        if self.headers["x-api-key"] != KEY:
            return self.answer(401, {"code": 401, "message": "no such key"})
        if self.server.refusing:
            self.server.refusing -= 1
            return self.answer(500, {"code": 500, "message": "no machine is free"})
        name = f"sandbox{len(self.server.wanted)}"
        self.server.running.add(name)
        self.server.most = max(self.server.most, len(self.server.running))
        made = {"templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.6.0"}
        return self.answer(201, {**made, "envdAccessToken": "token"})

    def run(self, asked: dict[str, Any]) -> None:
        """A stream of enveloped JSON messages, as the Connect protocol has it."""
        self.send_response(200)
        self.send_header("content-type", "application/connect+json")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        self.message({"event": {"start": {"pid": 1}}})
        process = asked["process"]
        with subprocess.Popen(
            [process["cmd"], "-c", process["args"][-1]],
            cwd=self.server.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        ) as child:  # fmt: skip
            limit_s = int(self.headers.get("connect-timeout-ms", "60000")) / 1000
            try:
                out, err = child.communicate(timeout=limit_s + self.server.late_s)
            except subprocess.TimeoutExpired:
                child.kill()
                return self.message({"error": {"code": "deadline_exceeded", "message": "deadline"}}, flags=2)
        if not self.server.running:
            return None  # it was killed meanwhile: the stream just ends
        for name, data in (("stdout", out), ("stderr", err)):
            if data:
                self.message({"event": {"data": {name: base64.b64encode(data).decode()}}})
        self.message({"event": {"end": {"exitCode": child.returncode, "exited": True, "status": "exited"}}})
        self.message({}, flags=2)
        return None

    def message(self, content: dict[str, Any], flags: int = 0) -> None:
        data = json.dumps(content).encode()
        self.wfile.write(struct.pack(">BI", flags, len(data)) + data)
        self.wfile.flush()

    def write_file(self, body: bytes) -> None:
        """One part of a form."""
        boundary = re.findall(r"boundary=(.+)", self.headers["content-type"])[0].encode()
        content = body.split(b"--" + boundary)[1].partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        path = self.file()
        if path.is_dir():
            return self.answer(400, {"code": 400, "message": "path is a directory"})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return self.answer(200, [{"path": str(path), "name": path.name, "type": "file"}])

    def file(self) -> Path:
        return self.server.folder / parse_qs(urlsplit(self.path).query)["path"][0].lstrip("/")

    def answer(self, status: int, content: Any) -> None:
        data = b"" if status == 204 else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def e2b_service(folder: Path) -> Iterator[Service]:
    with Service(folder) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.02,))
        thread.start()
        yield service
        service.shutdown()
        thread.join()
