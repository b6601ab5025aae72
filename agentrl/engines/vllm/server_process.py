"""One vLLM server on this machine, as a child process: ``python -m agentrl.engines.vllm.server_process``."""

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
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Self

import httpx2
import torch

from agentrl.engines.server_keys import KEY_ENV, create_server_key, remove_server_key
from agentrl.engines.vllm import launch
from agentrl.engines.vllm.parent_watch import end_with_parent
from agentrl.engines.vllm.tool_parsers import OWN, PLUGIN
from agentrl.errors import UserError
from agentrl.settings.load import LoadConfig

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
DOOR = "agentrl.engines.vllm.server_door.ServerDoor"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server."""

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
    load: LoadConfig = field(default_factory=LoadConfig)
    fp32_head: bool = False  # logits are computed in float32

    def build_flags(self, port: int) -> list[str]:
        """Build the command line flags of vLLM's server."""
        from transformers import AutoConfig

        options = self._loading_options
        config = AutoConfig.from_pretrained(self.model, **options).get_text_config()
        limit = int(config.max_position_embeddings)
        context = min(self.max_context or limit, limit)
        cache_bytes = launch.compute_cache_bytes(config, self.dtype, self.capacity * context)
        arguments = launch.build_engine_arguments(
            self.model,
            self.dtype,
            max_context=context,
            capacity=self.capacity,
            cache_bytes=cache_bytes,
            backend=self.backend,
            rank=self.lora_rank,
        )
        own = {"host": LOOPBACK, "port": port, "enable_scale_out": True, "enable_prompt_tokens_details": True}
        own |= {"middleware": DOOR, **options}
        if "revision" in options:
            own |= {"tokenizer_revision": options["revision"]}
        if self.fp32_head:
            own |= {"hf_overrides": {"head_dtype": "float32"}}
        if self.tool_parser is not None:
            own |= {"enable_auto_tool_choice": True, "tool_call_parser": self.tool_parser}
        if self.tool_parser == OWN:
            own |= {"tool_parser_plugin": PLUGIN}
        quiet = {"disable_log_stats": True, "uvicorn_log_level": "error", "use_tqdm_on_load": False}
        return [word for name, value in {**arguments, **own, **quiet}.items() for word in _flag(name, value)]

    @property
    def _loading_options(self) -> dict[str, object]:
        """Return how the model is loaded, by transformers' names, which are vLLM's too."""
        revision = {"revision": self.load.revision} if self.load.revision else {}
        return {"trust_remote_code": self.load.trust_remote_code, **revision}


class VLLMServer:
    """A running server; a context manager that ends it."""

    def __init__(self, settings: ServerSettings) -> None:
        launch.import_vllm()
        self.port = settings.port or find_free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self._start_s = settings.start_s
        command = [sys.executable, "-m", __name__, *settings.build_flags(self.port)]
        self._key = create_server_key(self.port)
        variables = {
            **os.environ,
            **launch.build_environment(settings.threads or 1, settings.backend),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        variables[KEY_ENV] = self._key  # not in the words, which each user of the machine can list
        if settings.lora_rank:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        # A session of its own: Ctrl-C in the terminal does not reach it; close() ends it.
        self._child = subprocess.Popen(command, env=variables, start_new_session=True, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait(self) -> Self:
        """Wait until it answers.

        Raises:
            UserError: it does not answer in time, or has ended.
        """
        deadline = monotonic() + self._start_s
        while self._child.poll() is None and monotonic() < deadline:
            if _is_healthy(self.url):
                return self
            sleep(0.2)
        status = self._child.poll()
        self.close()
        problem = (
            f"did not answer in {self._start_s:g} s" if status is None else f"ended ({launch.describe_exit(status)})"
        )
        raise UserError(
            f"the vLLM server at {self.url} {problem}; what it wrote stands above, VLLM_LOGGING_LEVEL=INFO makes it "
            "say more, and a port that is taken is another's: give --port"
        )

    def is_running(self) -> bool:
        """Return True until the process has ended."""
        return self._child.poll() is None

    def close(self) -> None:
        """End the server, and the engine's process with it."""
        remove_server_key(self.port, self._key)
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


def _is_healthy(url: str) -> bool:
    try:
        return bool(httpx2.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200)
    except httpx2.HTTPError:
        return False


def find_free_port() -> int:
    """Find a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    end_with_parent()
    try:
        runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    os._exit(0)  # at once: what its libraries print at exit helps nobody
