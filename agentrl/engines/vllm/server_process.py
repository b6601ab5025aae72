"""One vLLM server on this machine, as a child process: ``python -m agentrl.engines.vllm.server_process``."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Self

import httpx2
import torch

from agentrl.engines.server_keys import EVERYWHERE, KEY_ENV, create_server_key, format_url, remove_server_key
from agentrl.engines.vllm import launch
from agentrl.engines.vllm.server_flags import format_flag
from agentrl.engines.vllm.tool_parsers import OWN, PLUGIN
from agentrl.errors import UserError
from agentrl.runtime.parent_watch import end_with_parent
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
    host: str = LOOPBACK  # what it listens on
    tensor_parallel: int = 1  # GPUs that a model is cut over
    data_parallel: int = 1  # copies of the model
    gpu_share: float | None = None  # of each GPU's memory; None: vLLM's own
    flags: Mapping[str, object] = field(default_factory=dict)  # more of vLLM's, checked
    key: str | None = None  # None: that of the environment, or one drawn
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
        arguments |= {"tensor_parallel_size": self.tensor_parallel, "data_parallel_size": self.data_parallel}
        arguments |= {"gpu_memory_utilization": self.gpu_share}
        own = {"host": self.host, "port": port, "enable_scale_out": True, "enable_prompt_tokens_details": True}
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
        every = {**arguments, **own, **quiet, **self.flags}
        return [word for name, value in every.items() for word in format_flag(name, value)]

    @property
    def _loading_options(self) -> dict[str, object]:
        """Return how the model is loaded, by transformers' names, which are vLLM's too."""
        revision = {"revision": self.load.revision} if self.load.revision else {}
        return {"trust_remote_code": self.load.trust_remote_code, **revision}


class VLLMServer:
    """A running server; a context manager that ends it."""

    def __init__(self, settings: ServerSettings) -> None:
        launch.import_vllm()
        self.port = settings.port or find_free_port(settings.host)
        self.url = format_url(settings.host, self.port)
        self._local_url = format_url(LOOPBACK if settings.host in EVERYWHERE else settings.host, self.port)
        self._start_s = settings.start_s
        command = [sys.executable, "-m", __name__, *settings.build_flags(self.port)]
        self._key = settings.key or create_server_key(self.port)
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
            if _is_healthy(self._local_url):
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


def find_free_port(host: str = LOOPBACK) -> int:
    """Find a port that nothing listens on.

    Raises:
        UserError: the host is no address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UserError(f"--host {host} is no address of this machine ({error.strerror or error})") from None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    end_with_parent()
    try:
        runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    os._exit(0)  # at once: what its libraries print at exit helps nobody
