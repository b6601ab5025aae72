"""``agentrl serve``."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Literal

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import ConfigError
from agentrl.models.recommendation import was_trained_with_fp32_head
from agentrl.models.source import ModelSource, find_source, resolve_dtype
from agentrl.settings.load import DType, LoadConfig
from agentrl.settings.section import Section

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
    dtype: DType = Field("float32", description="as that of the training; auto: the one that the weights are stored in")
    revision: str | None = Field(None, description="of a model of the hub: a branch, a tag or a commit")
    trust_remote_code: bool = Field(False, description="run the code that the model brings with it")
    cast_lm_head_to_fp32: bool = Field(False, description="compute logits in float32, as that of the training")
    max_model_len: int | None = Field(
        None, ge=2, description="positions of an episode; the model's own limit by default"
    )
    max_num_seqs: int = Field(128, ge=1, description="rows sampled at the same time")
    threads: int | None = Field(None, ge=1, description="of its process on the CPU; 1 by default")
    lora_rank: int | None = Field(None, ge=1, description="that of the training, where an adapter is trained")
    tool_parser: str | None = Field(
        None,
        description="reader of tool calls, for its chat API: agentrl's own where the chat template has calls, or the "
        "name of one of vLLM's",
    )
    backend: Literal["memory", "nccl", "ipc"] | None = Field(
        None, description="how weights come: memory on the CPU, nccl on GPUs by default"
    )


def _run(arguments: Arguments[_ServeOptions]) -> int:
    options = arguments.options
    import torch

    from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
    from agentrl.engines.vllm.tool_parsers import find_tool_parser
    from agentrl.models import lora, policy

    load = LoadConfig(revision=options.revision, trust_remote_code=options.trust_remote_code)
    source = find_source(options.model, load)
    base = policy.find_base(source, load)
    rank = 0 if base is source else lora.read_rank(Path(source.place))
    tokenizer = policy.load_tokenizer(options.model, load)
    signal.signal(signal.SIGTERM, _end)
    with _unpack_gguf(base, load) as model:
        serving = ServerSettings(
            model,
            dtype=getattr(torch, resolve_dtype(base, options.dtype)),
            port=options.port,
            max_context=options.max_model_len,
            capacity=options.max_num_seqs,
            threads=options.threads,
            lora_rank=options.lora_rank or rank,
            tool_parser=options.tool_parser or find_tool_parser(tokenizer),
            backend=options.backend or ("nccl" if torch.cuda.is_available() else "memory"),
            load=load.model_copy(update={"revision": base.options.get("revision")}),
            fp32_head=options.cast_lm_head_to_fp32 or (bool(rank) and was_trained_with_fp32_head(Path(source.place))),
        )
        with VLLMServer(serving) as server:
            server.wait()
            print(server.url, flush=True)
            while server.is_running():
                time.sleep(0.2)
    raise ConfigError(f"the vLLM server at {server.url} ended by itself; what it wrote stands above")


@contextmanager
def _unpack_gguf(source: ModelSource, load: LoadConfig) -> Iterator[str]:
    """Give the folder or the name that vLLM loads: of a GGUF file a folder that is written for it."""
    if source.gguf_file is None:
        yield source.place
        return
    from agentrl.models.policy import load_policy

    with TemporaryDirectory(prefix="agentrl-gguf-") as folder:
        load_policy(source.name, load=load).save(Path(folder))
        yield folder


def _end(_signal: int, _frame: FrameType | None) -> Any:
    raise SystemExit(0)


COMMAND = Command("serve", "--model MODEL [--port PORT] [--SETTING VALUE ...]", TEXT, _run, _ServeOptions)
