"""``agentrl view`` as somebody starts it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class Site:
    """``agentrl view`` in a process of its own."""

    def __init__(self, *folders: Path, panels: str = "") -> None:
        command = [
            sys.executable,
            "-m",
            "agentrl",
            "view",
            *map(str, folders),
            *(["--panels", panels] if panels else []),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", self.said)
        assert found, self.said + (self.process.communicate()[1] if self.process.poll() is not None else "")
        self.url, self.token = found[1], found[2]
        end = time.monotonic() + 60
        while any(run["progress"] < 1.0 for run in self.json("runs")):  # they are read meanwhile
            assert time.monotonic() < end
            time.sleep(0.02)

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("Authorization", f"Bearer {self.token}")
        try:
            with urlopen(Request(self.url + path, headers=named), timeout=120) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except HTTPError as error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()

    def json(self, path: str) -> Any:
        status, _, body = self.get(f"/api/{path}")
        assert status == 200, body
        return json.loads(body)

    def close(self) -> int:
        self.process.send_signal(signal.SIGINT)
        with self.process:
            self.process.communicate(timeout=120)
        return self.process.returncode
