"""What a run holds open: the policy, its renderer, the engine that samples from it, the environment's shared part."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from agentrl import lora, policy
from agentrl.allocator import garbage_sought_seldom, keep_freed_memory
from agentrl.config import EngineConfig, TrainConfig
from agentrl.engine import OpenEngine
from agentrl.engines import launch
from agentrl.engines.server import ServerEngine
from agentrl.engines.transformers import TransformersEngine
from agentrl.engines.vllm import VLLMEngine
from agentrl.env import EnvSpec
from agentrl.errors import UserError
from agentrl.policy import Policy
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout import Rollout, check_deadlines


@dataclass(frozen=True)
class Session:
    """Everything that plays episodes."""

    config: TrainConfig
    spec: EnvSpec
    policy: Policy
    renderer: TemplateRenderer
    engine: OpenEngine

    def rollout(self, split: str) -> Rollout:
        return Rollout.configured(self.config.rollout, self.spec, self.engine, self.renderer, split)


@asynccontextmanager
async def opened(config: TrainConfig, spec: EnvSpec, loaded: Policy | None = None) -> AsyncIterator[Session]:
    """Load and start what the config names. Raises UserError where something cannot be."""
    keep_freed_memory()
    loaded = made_policy(config, loaded)
    settings = chosen(config.engine, loaded.model, embedded=config.deterministic)
    config = config.model_copy(update={"engine": settings})
    renderer = TemplateRenderer(loaded.tokenizer, policy.read_template(config.chat_template), loaded.end_tokens)
    async with spec.open(), make_engine(config, loaded.model) as engine:
        check_deadlines(spec, config.rollout.turn_timeout_s)
        with garbage_sought_seldom():
            yield Session(config, spec, loaded, renderer, engine)


def made_policy(config: TrainConfig, loaded: Policy | None = None) -> Policy:
    """The policy that the config names, or the one given, with the adapter that the config wants."""
    loaded = loaded or policy.load(config.model, config.dtype, config.lora.quantize)
    if config.lora.rank is not None:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            loaded = replace(loaded, model=lora.wrapped(loaded.model, config.lora, config.model))
    if config.lora.quantize and not lora.has_adapter(loaded.model):
        raise UserError("lora.quantize: weights in 4 bits are not trained themselves; give lora.rank too")
    return loaded


def chosen(e: EngineConfig, model: Any, *, embedded: bool = False) -> EngineConfig:
    """The settings with an engine's own name. On the CPU the embedded one is as fast, and starts at once."""
    if e.name != "auto":
        return e
    vllm = model.device.type == "cuda" and launch.installed() and not embedded
    return e.model_copy(update={"name": "vllm" if vllm else "transformers"})


def check_processes(e: EngineConfig, *, deterministic: bool = False) -> None:
    """Refuse vLLM in this process beside further processes of the learner, on GPUs.

    Its sender of weights gathers over all processes, while the others wait for rows: everybody waits for ever.

    Raises:
        UserError: vLLM is named, or chosen by ``auto``, and torchrun has started several processes.
        SystemExit: the same, in the processes after the first one, which says it.
    """
    world, rank = (int(os.environ.get(name, fresh)) for name, fresh in (("WORLD_SIZE", "1"), ("RANK", "0")))
    automatic = e.name == "auto" and launch.installed() and not deterministic
    if world == 1 or not torch.cuda.is_available() or not (automatic or e.name == "vllm"):
        return
    if rank:
        raise SystemExit(2)
    raise UserError(
        f"engine.name {e.name!r} is vLLM in the first process here, whose weight updates do not go together with the "
        f"{world} processes that torchrun started; sample from servers (agentrl serve MODEL, then --engine.name server "
        "--engine.urls http://HOST:PORT), or with --engine.name transformers"
    )


def make_engine(config: TrainConfig, model: Any) -> OpenEngine:
    """The engine that the settings name, to be entered."""
    e, ahead = config.engine, config.rollout.max_staleness > 0  # it samples while the learner learns
    update = e.update or "in-flight"
    if e.name == "vllm":
        return VLLMEngine(model, capacity=e.capacity, max_context=e.max_context, threads=e.threads, update=update)
    if e.name == "server":
        return ServerEngine(e.urls, model, capacity=e.capacity, max_context=e.max_context, update=update)
    if config.deterministic:  # what a row's numbers are rounded to depends on the rows beside it, and on what was kept
        return TransformersEngine(model, capacity=1, max_context=e.max_context, threads=e.threads, keep_bytes=0)
    return TransformersEngine(model, capacity=e.capacity, max_context=e.max_context, threads=e.threads, snapshot=ahead)
