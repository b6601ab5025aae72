"""``agentrl export``: a plain model with its card, here and on the model hub (a stand-in that speaks its API)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from agentrl import train
from agentrl.cli import main
from agentrl.models.model_card import format_model_card
from agentrl.models.source import locate_model

SMALL: dict[str, Any] = {
    "steps": 1,
    "rollout": {"tasks_per_step": 2, "group_size": 2},
    "eval": {"final_tasks": 2, "every": 0},
    "lora": {"rank": 4},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    train("math-tools", run={"dir": str(folder)}, **SMALL)
    return folder


class Hub(ThreadingHTTPServer):
    """Remembers what it was asked to make and what was put there."""

    daemon_threads = True

    def __init__(self, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refuses = refuses
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses or self.headers["Authorization"] != "Bearer hf_secret":
            return self._say(403, {"error": "You may not create models for other"})
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            made = json.loads(body)
            here = f"http://127.0.0.1:{self.server.server_port}"
            return self._say(200, {"url": f"{here}/{made['organization']}/{made['name']}"})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            return self._say(
                200,
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]},
            )
        if self.path == "/api/validate-yaml":
            return self._say(200, {"errors": [], "warnings": []})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        here = f"http://127.0.0.1:{self.server.server_port}"
        return self._say(200, {"commitUrl": f"{here}/me/small/commit/1", "commitOid": "1"})

    def do_GET(self) -> None:
        self._say(404, {"error": "no such thing"})

    def _say(self, status: int, what: Any) -> None:
        body = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    with Hub(getattr(request, "param", False)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def exported(hub: Hub, *words: str, token: str | None = "hf_secret") -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's address is read when its library is imported."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    home = os.path.join(tempfile.gettempdir(), "agentrl-no-hub")
    variables |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": home, "NO_PROXY": "*"}
    variables |= {"HF_TOKEN": token} if token else {}
    return subprocess.run(
        [sys.executable, "-m", "agentrl", "export", *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_run_is_pushed_with_its_card(hub: Hub, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    done = exported(hub, str(run), "--out", str(out), "--push_to_hub", "me/small")
    assert done.returncode == 0, done.stderr
    assert f":{hub.server_port}/me/small" in done.stdout
    (made,) = hub.made
    assert (made["name"], made["organization"]) == ("small", "me")
    assert "private" in made.values() or made.get("private")
    assert hub.files.keys() == {f.name for f in out.iterdir() if f.is_file()} >= {"model.safetensors", "README.md"}
    assert hub.files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    told = hub.files["README.md"].decode()
    assert told.startswith("---\nlibrary_name:")
    assert "# me/small" in told
    assert "`nano`, trained with agentrl" in told
    assert "rank = 4" in told
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.slow
@pytest.mark.parametrize("hub", [True], indirect=True)
def test_a_hub_that_refuses_is_quoted(hub: Hub, run: Path, tmp_path: Path) -> None:
    done = exported(hub, str(run), "--out", str(tmp_path / "out"), "--push_to_hub", "other/small", "--public", "true")
    assert done.returncode == 2
    assert done.stderr.startswith("agentrl: cannot push to 'other/small': ")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_without_a_token_it_says_how_to_get_one(hub: Hub, run: Path, tmp_path: Path) -> None:
    done = exported(hub, str(run), "--out", str(tmp_path / "out"), "--push_to_hub", "me/small", token=None)
    assert "there is no token; `hf auth login`" in done.stderr
    assert not hub.made
    assert not (tmp_path / "out").exists()


def test_a_card_says_what_came_of_a_run(run: Path) -> None:
    told = format_model_card("mine", str(run / "model"))
    assert "| held-out reward | before | after |" in told
    assert "1 steps on the environment `math-tools`" in told
    assert "A copy of `" in format_model_card("copy", locate_model("nano"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nano"], "--out is missing: a folder that is empty, or not there yet"),
        (["--out", "x"], "agentrl export takes: MODEL --out DIR"),
        (["nano", "--oout", "x"], "oout: unknown setting; did you mean 'out'?"),
        (["nano", "--out", "x", "--push_to_hub", "small"], "--push_to_hub: "),
    ],
)
def test_mistakes_are_sentences(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *words]) != 0
    assert said in capsys.readouterr().err
