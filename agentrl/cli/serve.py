"""``agentrl serve``."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from pydantic import Field

from agentrl.cli.words import flags
from agentrl.config import Section
from agentrl.engines.tool_parsers import find_tool_parser
from agentrl.errors import ConfigError

HELP = """usage: agentrl serve --model MODEL [--port PORT] [--SETTING VALUE ...]

  agentrl serve --model nano
  agentrl serve --model Qwen/Qwen3-0.6B --port 8000 --dtype bfloat16

Starts one vLLM server on this machine's loopback address, prints its URL when it answers, and ends it when this
command ends. Then, elsewhere: agentrl train --model MODEL --engine server --engine.urls URL,URL
It speaks OpenAI's chat completions too: agentrl eval --env ENV --endpoint URL/v1
"""


class Settings(Section):
    model: str = Field(description="as for agentrl train")
    port: int | None = Field(None, ge=1, le=65535, description="a free one by default")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="as that of the training")
    max_context: int | None = Field(None, ge=2, description="positions of an episode; the model's own limit by default")
    capacity: int = Field(128, ge=1, description="rows sampled at the same time")
    threads: int | None = Field(None, ge=1, description="of its process on the CPU; 1 by default")
    lora_rank: int | None = Field(None, ge=1, description="that of the training, where an adapter is trained")
    tool_parser: str | None = Field(
        None,
        description="vLLM's reader of tool calls, for its chat API; by the model's chat template by default",
    )
    backend: Literal["memory", "nccl", "ipc"] | None = Field(
        None, description="how weights come: memory on the CPU, nccl on GPUs by default"
    )


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        fields = Settings.model_fields.items()
        print(HELP + "\n" + "\n".join(f"  --{name:<12} {field.description}" for name, field in fields))
        return 0
    settings = flags(words, Settings)
    import torch

    from agentrl import lora, policy
    from agentrl.engines.serving import Server, Serving

    source = policy.locate(settings.model)
    rank = lora.rank_in(Path(source)) if lora.is_adapter(source) else 0
    serving = Serving(
        policy.locate(lora.base_of(Path(source))) if rank else source,
        dtype=getattr(torch, settings.dtype),
        port=settings.port,
        max_context=settings.max_context,
        capacity=settings.capacity,
        threads=settings.threads,
        lora_rank=settings.lora_rank or rank,
        tool_parser=settings.tool_parser or find_tool_parser(policy.load_tokenizer(settings.model).chat_template),
        backend=settings.backend or ("nccl" if torch.cuda.is_available() else "memory"),
    )
    signal.signal(signal.SIGTERM, _end)
    with Server(serving) as server:
        server.wait()
        print(server.url, flush=True)
        while server.running():
            time.sleep(0.2)
    raise ConfigError(f"the vLLM server at {server.url} ended by itself; what it wrote stands above")


def _end(_signal: int, _frame: FrameType | None) -> Any:
    raise SystemExit(0)
