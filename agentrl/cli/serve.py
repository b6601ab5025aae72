"""``agentrl serve``."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Literal

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.engines.server_keys import KEY_ENV, LOCAL
from agentrl.engines.vllm.server_flags import check_flags, list_installed_flags
from agentrl.errors import ConfigError
from agentrl.models.recommendation import was_trained_with_fp32_head
from agentrl.models.source import ModelSource, find_source, resolve_dtype
from agentrl.settings.load import DType, LoadConfig
from agentrl.settings.section import Section

TEXT = """\
  agentrl serve --model nano
  agentrl serve --model Qwen/Qwen3-0.6B --port 8000 --dtype bfloat16
  VLLM_API_KEY=... agentrl serve --model Qwen/Qwen3-32B --dtype bfloat16 --tp 4 --host 10.0.0.5 --port 8000
  agentrl serve --model Qwen/Qwen3-0.6B --vllm.kv_cache_dtype fp8 --vllm.enforce_eager

Starts one vLLM server on this machine's loopback address, prints its URL when it answers, and ends it when this
command ends; what to paste into agentrl train is printed at the start. Other machines reach it by --host, with a key.
It speaks OpenAI's chat completions too: agentrl eval --env ENV --endpoint URL/v1
"""


LOOPBACK = "127.0.0.1"


class _ServeOptions(Section):
    model: str = Field(description="as for agentrl train")
    port: int | None = Field(None, ge=1, le=65535, description="a free one by default")
    host: str = Field(LOOPBACK, description="address to listen on; other than loopback only with a key of your own")
    api_key_env: str = Field(KEY_ENV, description="environment variable that holds the key, where you set one")
    tp: int = Field(1, ge=1, description="GPUs that the model is cut over (tensor parallel)")
    dp: int = Field(1, ge=1, description="copies of the model behind one address (data parallel)")
    gpu_share: float | None = Field(None, gt=0, lt=1, description="of each GPU's memory; vLLM's own by default")
    vllm: dict[str, Any] = Field({}, description="vLLM's own flags: --vllm.FLAG VALUE, or --vllm.FLAG of a switch")
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
    backend: Literal["memory", "nccl", "nccl_m2n", "ipc"] | None = Field(
        None,
        description="how weights come: memory on the CPU, nccl on GPUs by default; nccl_m2n: from "
        "each rank of a learner in shards",
    )


def _run(arguments: Arguments[_ServeOptions]) -> int:
    options = arguments.options
    flags = check_flags(options.vllm, list_installed_flags())
    key = _find_key(options.host, options.api_key_env)
    import torch

    if options.gpu_share is not None and not torch.cuda.is_available():
        raise ConfigError(f"--gpu_share {options.gpu_share:g} is of a GPU, and torch sees none here: leave it out")

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
            host=options.host,
            key=key,
            tensor_parallel=options.tp,
            data_parallel=options.dp,
            gpu_share=options.gpu_share,
            flags=flags,
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
            print(f"starting; then: {_format_training(options, server.url, key)}", file=sys.stderr, flush=True)
            server.wait()
            print(server.url, flush=True)
            while server.is_running():
                time.sleep(0.2)
    raise ConfigError(f"the vLLM server at {server.url} ended by itself; what it wrote stands above")


def _find_key(host: str, variable: str) -> str | None:
    """Return the key that the user has set; None where one may be drawn, which only this machine finds.

    Raises:
        ConfigError: there is none, and one is needed.
    """
    if key := os.environ.get(variable):
        return key
    if variable != KEY_ENV:
        raise ConfigError(f"--api_key_env {variable}: ${variable} is not set")
    if host not in LOCAL:
        raise ConfigError(
            f"--host {host} lets other machines replace the weights: set ${KEY_ENV} to a long random key of your own, "
            "here and for agentrl train"
        )
    return None


def _format_training(options: _ServeOptions, url: str, key: str | None) -> str:
    """Format the command of a training that samples from the server."""
    words = ["agentrl", "train", "--env", "ENV", "--model", options.model, "--dtype", options.dtype]
    words += ["--lora.rank", str(options.lora_rank)] if options.lora_rank else []
    words += ["--engine", "server", "--engine.urls", url]
    variable = f'{KEY_ENV}="${options.api_key_env}" ' if key is not None else ""
    return variable + shlex.join(words)


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
