"""What a run holds open: the policy, its renderer, the engine that samples from it, the environment's shared part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl import policy
from agentrl.allocator import keep_freed_memory
from agentrl.config import TrainConfig
from agentrl.engines.transformers import TransformersEngine
from agentrl.env import EnvSpec
from agentrl.policy import Policy
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout import Rollout


@dataclass(frozen=True)
class Session:
    """Everything that plays episodes."""

    config: TrainConfig
    spec: EnvSpec
    policy: Policy
    renderer: TemplateRenderer
    engine: TransformersEngine

    def rollout(self, split: str) -> Rollout:
        return Rollout.configured(self.config.rollout, self.spec, self.engine, self.renderer, split)


@asynccontextmanager
async def opened(config: TrainConfig, spec: EnvSpec, loaded: Policy | None = None) -> AsyncIterator[Session]:
    """Load and start what the config names. Raises UserError where something cannot be."""
    keep_freed_memory()
    loaded = loaded or policy.load(config.model, config.dtype)
    renderer = TemplateRenderer(loaded.tokenizer, policy.read_template(config.chat_template))
    e = config.engine
    engine = TransformersEngine(loaded.model, capacity=e.capacity, max_context=e.max_context, threads=e.threads)
    async with spec.open(), engine:
        yield Session(config, spec, loaded, renderer, engine)
