"""The packages beyond the plain install that a run's own settings need, checked before anything is loaded.

What is registered (an environment, a tool, a reward) declares its own in ``needs``: see `registry.check_needs`.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.settings.registry import check_package
from agentrl.settings.schema import TrainConfig


def check_extras(config: TrainConfig) -> None:
    """Raise UserError where a setting needs a package that is missing; the sentence names the extra that brings it."""
    for what, module, extra in _needs(config):
        check_package(what, module, extra)


def _needs(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    if config.model.lower().endswith(".gguf"):
        yield f"model {config.model!r}", "gguf", "gguf"
    if config.lora.rank is not None:
        yield "lora.rank", "peft", "lora"
    if config.lora.quantize:
        yield "lora.quantize", "bitsandbytes", "quant"
    if config.learner.optimizer == "adamw_8bit":
        yield "learner.optimizer adamw_8bit", "bitsandbytes", "quant"
    if config.rollout.structured_outputs:
        yield "rollout.structured_outputs", "llguidance", "structured"
    if config.run.trackers:
        yield "run.trackers", "accelerate", "track"
