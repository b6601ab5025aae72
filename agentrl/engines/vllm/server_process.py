"""One vLLM server on this machine, as a child process: ``python -m agentrl.engines.serving`` is what the child runs."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Self

import httpx2
import torch

from agentrl.engines import launch
from agentrl.engines.orphan import end_with_parent
from agentrl.errors import UserError

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Serving:
    """What a server is started with."""

    model: str  # a folder, or a name on the model hub
    dtype: torch.dtype = torch.float32
    port: int | None = None  # None: a free one
    max_context: int | None = None
    capacity: int = 128
    threads: int | None = None
    backend: str = "memory"  # how weights arrive
    lora_rank: int = 0  # the largest of an adapter, where one is trained
    tool_parser: str | None = None  # vLLM's name of what reads calls, for its chat API; None: it takes no tools
    start_s: float = 600.0

    def flags(self, port: int) -> list[str]:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model).get_text_config()
        limit = int(config.max_position_embeddings)
        context = min(self.max_context or limit, limit)
        room = launch.cache_bytes(config, self.dtype, self.capacity * context)
        given = launch.settings(
            self.model,
            self.dtype,
            max_context=context,
            capacity=self.capacity,
            cache_bytes=room,
            backend=self.backend,
            rank=self.lora_rank,
        )
        own = {"host": LOOPBACK, "port": port, "enable_scale_out": True, "enable_prompt_tokens_details": True}
        if self.tool_parser is not None:
            own |= {"enable_auto_tool_choice": True, "tool_call_parser": self.tool_parser}
        quiet = {"disable_log_stats": True, "uvicorn_log_level": "error", "use_tqdm_on_load": False}
        return [word for name, value in {**given, **own, **quiet}.items() for word in _flag(name, value)]


class Server:
    """A running server; a context manager that ends it."""

    def __init__(self, serving: Serving) -> None:
        launch.require()
        self.port = serving.port or free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._start_s = serving.start_s
        command = [sys.executable, "-m", __name__, *serving.flags(self.port)]
        variables = {**os.environ, **launch.variables(serving.threads or 1), "VLLM_SERVER_DEV_MODE": "1"}
        if serving.lora_rank:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        # A session of its own: Ctrl-C in the terminal is for us, who end it in our own time.
        self._child = subprocess.Popen(command, env=variables, start_new_session=True, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait(self) -> Self:
        """Until it answers. Raises UserError where it does not in time, or ends."""
        deadline = monotonic() + self._start_s
        while self._child.poll() is None and monotonic() < deadline:
            if healthy(self.url):
                return self
            sleep(0.2)
        status = self._child.poll()
        self.close()
        what = f"did not answer in {self._start_s:g} s" if status is None else f"ended ({launch.ending(status)})"
        raise UserError(
            f"the vLLM server at {self.url} {what}; what it wrote stands above, VLLM_LOGGING_LEVEL=INFO makes it say "
            "more, and a port that is taken is another's: give --port"
        )

    def running(self) -> bool:
        return self._child.poll() is None

    def close(self) -> None:
        """End it, and the engine's process with it."""
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(5)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        with suppress(ProcessLookupError, PermissionError):  # an engine that hangs as it ends, or outlived its server
            os.killpg(self._child.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def healthy(url: str) -> bool:
    try:
        return bool(httpx2.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200)
    except httpx2.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])


def _flag(name: str, value: Any) -> list[str]:
    word = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [word if value else f"--no-{word[2:]}"]
    return [word, json.dumps(value) if isinstance(value, dict) else str(value)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    end_with_parent()
    try:
        runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    os._exit(0)  # at once: what its libraries say of themselves as they are taken apart helps nobody
