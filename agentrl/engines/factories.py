"""The engines by name: each is declared with `agentrl.engine`, which makes it a name of ``--engine``.

One is called with the policy and the settings of the run, and returns an `OpenEngine`, not yet started. The parameters
of an engine are settings: ``engine.threads``, ``engine.dtype``, ``engine.urls``, ``engine.update`` and ``engine.args``.
This module loads torch when an engine is made.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from agentrl.engines.vllm.transfer_backend import TransferBackend
from agentrl.errors import UserError
from agentrl.runtime.addresses import split_address
from agentrl.settings.entries import engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.rollout.engine_protocol import OpenEngine
    from agentrl.settings.schema import TrainConfig

Threads = Annotated[int, Field(ge=1)] | None
Update = Literal["in-flight", "drain"]
GpuShareNumber = Annotated[float, Field(gt=0, lt=1)] | None


def _check_port_range(text: str) -> str:
    """Refuse what is no range of ports."""
    parts = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]) <= 65535:
        raise ValueError("a range of ports is such as 29600-29699")
    return text


PortRange = Annotated[str, AfterValidator(_check_port_range)] | None
Seconds = Annotated[float, Field(gt=0)]
Precision = Literal["auto", "float32", "bfloat16"]


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    if not urls:
        raise ValueError("the servers' addresses; agentrl serve starts one")
    for url in urls:
        try:
            if "$" not in url or not url.startswith(("http://", "https://")):  # what a variable has is not read here
                split_address(url)
        except ValueError as error:
            raise ValueError(f"addresses are such as http://127.0.0.1:8000, not {url!r} ({error})") from None
    return urls


@engine(explain="the embedded engine")
def transformers(
    model: PreTrainedModel, config: TrainConfig, *, threads: Threads = None, dtype: Precision = "auto"
) -> OpenEngine:
    """Sample in this process, on the CPU or a GPU.

    Args:
        threads: while sampling; by the model's size by default.
        dtype: of the products; auto: the weights'. The learner keeps its own.
    """
    import torch

    from agentrl.engines.embedded.engine import TransformersEngine

    open_engine = partial(
        TransformersEngine,
        model,
        max_context=config.engine.max_model_len,
        threads=threads,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        return_routed_experts=config.learner.router_replay,
    )
    if config.deterministic:  # rounding depends on the rows beside a row, and on what was cached
        return open_engine(capacity=1, keep_bytes=0)
    overlaps = config.rollout.max_staleness > 0  # it samples while the learner learns
    return open_engine(capacity=config.engine.max_num_seqs, snapshot=overlaps)


@engine(explain="vLLM in this process; weights go over {update}")
def vllm(
    model: PreTrainedModel,
    config: TrainConfig,
    *,
    threads: Threads = None,
    gpu_share: GpuShareNumber = None,
    update: Update = "in-flight",
) -> OpenEngine:
    """Sample with vLLM in this process.

    Args:
        threads: while sampling; by the model's size by default.
        gpu_share: of the GPU's memory, for vLLM beside the learner; by default what that leaves.
        update: in-flight: requests continue with new weights; drain: they end first.
    """
    from agentrl.engines.vllm.engine import VLLMEngine
    from agentrl.engines.vllm.gpu_share import divide_gpu

    e = config.engine
    return VLLMEngine(
        model,
        capacity=e.max_num_seqs,
        max_context=e.max_model_len,
        threads=threads,
        update=update,
        gpu_share=divide_gpu(config, model, gpu_share),
        return_routed_experts=config.learner.router_replay,
    )


@engine(explain="vLLM servers at {urls}; weights go over {update}")
def server(
    model: PreTrainedModel,
    config: TrainConfig,
    *,
    urls: Annotated[tuple[str, ...], AfterValidator(_check_urls)],
    update: Update = "in-flight",
    weight_sync_timeout_s: Seconds = 10.0,
    master_address: str | None = None,
    port_range: PortRange = None,
    weight_transfer: TransferBackend = "auto",
) -> OpenEngine:
    """Sample from vLLM servers, which `agentrl serve` starts.

    Args:
        urls: as agentrl serve prints them; commas between them.
        update: in-flight: requests continue with new weights; drain: they end first.
        weight_sync_timeout_s: of a stage of a weight transfer, beyond what the bytes take; then the server is lost.
        master_address: of this machine, where servers' GPUs meet it for weights; that of the route to each by default.
        port_range: of ports for that, such as 29600-29699; any free one by default.
        weight_transfer: memory, nccl, nccl_m2n; auto: as the servers were started for.
    """
    from agentrl.engines.vllm.rendezvous import build_rendezvous
    from agentrl.engines.vllm.server_pool import ServerEngine

    e = config.engine
    return ServerEngine(
        urls,
        model,
        capacity=e.max_num_seqs,
        max_context=e.max_model_len,
        update=update,
        weight_sync_timeout_s=weight_sync_timeout_s,
        rendezvous=build_rendezvous(master_address, port_range),
        weight_transfer=weight_transfer,
        return_routed_experts=config.learner.router_replay,
    )


@engine(explain="vLLM servers that {launcher} starts; weights go over {update}")
def launched(
    model: PreTrainedModel,
    config: TrainConfig,
    *,
    servers: Annotated[int, Field(ge=1)] = 1,
    launcher: str = "local",
    update: Update = "in-flight",
    weight_sync_timeout_s: Seconds = 10.0,
    master_address: str | None = None,
    port_range: PortRange = None,
    weight_transfer: TransferBackend = "auto",
) -> OpenEngine:
    """Start vLLM servers for the run, sample from them, and end them with it.

    Args:
        servers: how many.
        launcher: local: processes of this machine; or a registered name, module:function, file.py:function.
        update: in-flight: requests continue with new weights; drain: they end first.
        weight_sync_timeout_s: of a stage of a weight transfer, beyond what the bytes take; then the server is lost.
        master_address: of this machine, where servers' GPUs meet it for weights; that of the route to each by default.
        port_range: of ports for that, such as 29600-29699; any free one by default.
        weight_transfer: memory, nccl, nccl_m2n; auto: as the servers were started for.
    """
    from agentrl.engines.vllm.launchers import LaunchedEngine, plan_servers, plan_transfer
    from agentrl.engines.vllm.rendezvous import build_rendezvous

    return LaunchedEngine(
        model,
        config,
        launcher,
        plan_servers(config, servers, plan_transfer(model, weight_transfer)),
        update,
        weight_sync_timeout_s,
        build_rendezvous(master_address, port_range),
    )


@engine(explain="vllm on a GPU where it is installed, else transformers")
def auto(
    model: PreTrainedModel,
    config: TrainConfig,
    *,
    threads: Threads = None,
    dtype: Precision = "auto",
    gpu_share: GpuShareNumber = None,
) -> OpenEngine:
    """Sample with vLLM on a GPU where it is installed, else embedded. On the CPU the embedded one is as fast.

    Args:
        threads: while sampling; by the model's size by default.
        dtype: of the embedded engine's products; auto: the weights'.
        gpu_share: of the GPU's memory, for vLLM beside the learner; by default what that leaves.
    """
    if not prefers_vllm(model, config):
        if gpu_share is not None:
            raise UserError(
                f"engine.gpu_share {gpu_share:g} is vLLM's, and here --engine auto is the embedded engine: leave it out"
            )
        embedded: OpenEngine = transformers(model, config, threads=threads, dtype=dtype)
        return embedded
    if dtype != "auto":
        raise UserError(
            f"engine.dtype {dtype} is the embedded engine's, and here --engine auto is vLLM, which samples in the "
            "policy's own: --engine transformers, or --dtype for both"
        )
    served: OpenEngine = vllm(model, config, threads=threads, gpu_share=gpu_share)
    return served


def prefers_vllm(model: PreTrainedModel, config: TrainConfig) -> bool:
    """Return True where ``auto`` is vLLM."""
    from agentrl.engines.vllm import launch

    return model.device.type == "cuda" and launch.is_installed() and not config.deterministic
