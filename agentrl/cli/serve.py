"""``agentrl serve``."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.engines.vllm.tool_parsers import find_tool_parser
from agentrl.errors import ConfigError
from agentrl.settings.schema import Section

TEXT = """\
  agentrl serve --model nano
  agentrl serve --model Qwen/Qwen3-0.6B --port 8000 --dtype bfloat16

Starts one vLLM server on this machine's loopback address, prints its URL when it answers, and ends it when this
command ends. Then, elsewhere: agentrl train --model MODEL --engine server --engine.urls URL,URL
It speaks OpenAI's chat completions too: agentrl eval --env ENV --endpoint URL/v1
"""


class _ServeOptions(Section):
    model: str = Field(description="as for agentrl train")
    port: int | None = Field(None, ge=1, le=65535, description="a free one by default")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="as that of the training")
    max_model_len: int | None = Field(
        None, ge=2, description="positions of an episode; the model's own limit by default"
    )
    max_num_seqs: int = Field(128, ge=1, description="rows sampled at the same time")
    threads: int | None = Field(None, ge=1, description="of its process on the CPU; 1 by default")
    lora_rank: int | None = Field(None, ge=1, description="that of the training, where an adapter is trained")
    tool_parser: str | None = Field(
        None,
        description="vLLM's reader of tool calls, for its chat API; by the model's chat template by default",
    )
    backend: Literal["memory", "nccl", "ipc"] | None = Field(
        None, description="how weights come: memory on the CPU, nccl on GPUs by default"
    )


def _run(arguments: Arguments[_ServeOptions]) -> int:
    options = arguments.options
    import torch

    from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
    from agentrl.models import lora, policy

    source = policy.locate_model(options.model)
    rank = lora.read_rank(Path(source)) if lora.is_adapter(source) else 0
    serving = ServerSettings(
        policy.locate_model(lora.read_base_model(Path(source))) if rank else source,
        dtype=getattr(torch, options.dtype),
        port=options.port,
        max_context=options.max_model_len,
        capacity=options.max_num_seqs,
        threads=options.threads,
        lora_rank=options.lora_rank or rank,
        tool_parser=options.tool_parser or find_tool_parser(policy.load_tokenizer(options.model).chat_template),
        backend=options.backend or ("nccl" if torch.cuda.is_available() else "memory"),
    )
    signal.signal(signal.SIGTERM, _end)
    with VLLMServer(serving) as server:
        server.wait()
        print(server.url, flush=True)
        while server.is_running():
            time.sleep(0.2)
    raise ConfigError(f"the vLLM server at {server.url} ended by itself; what it wrote stands above")


def _end(_signal: int, _frame: FrameType | None) -> Any:
    raise SystemExit(0)


COMMAND = Command("serve", "--model MODEL [--port PORT] [--SETTING VALUE ...]", TEXT, _run, _ServeOptions)
