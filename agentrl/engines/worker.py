"""Loaded into vLLM's worker processes: the worker's side of the backend ``memory``, and a watch on the parent.

vLLM is given ``worker_extension_cls="agentrl.engines.worker.Extension"``; that it imports this module is what registers
the backend.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.engines.orphan import end_with_parent
from agentrl.engines.transfer import MEMORY


@dataclass
class Introduction(WeightTransferInitInfo):  # type: ignore[misc]
    """Whether this process can open the trainer's files: ``word`` stands in the one at ``path``."""

    path: str | None = None
    word: str = ""


@dataclass
class Tensors(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A safetensors file: where it is, or itself in base64."""

    path: str | None = None
    tensors: str | None = None


class MemoryTransfer(WeightTransferEngine[Introduction, Tensors]):  # type: ignore[misc]
    """The worker's end of ``memory``."""

    init_info_cls = Introduction
    update_info_cls = Tensors

    def init_transfer_engine(self, init_info: Introduction) -> None:
        if init_info.path is not None and Path(init_info.path).read_text() != init_info.word:
            raise ValueError("the trainer is not on this machine")

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Tensors) -> None:
        if update_info.path is not None:
            tensors = safetensors.torch.load_file(update_info.path)
        else:
            tensors = safetensors.torch.load(base64.b64decode(update_info.tensors or ""))
        self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied_head(self.model)

    def shutdown(self) -> None: ...


def _pack_tied_head(model: Any) -> None:
    """On the CPU the output head holds a packed copy of its weights, which a tied one is not given anew."""
    head = getattr(model, "lm_head", None)
    config = getattr(model, "config", None)
    if head is not None and getattr(config, "tie_word_embeddings", False) and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


class Extension:
    """What vLLM mixes into its worker: nothing; see the module."""


WeightTransferEngineFactory.register_engine(MEMORY, MemoryTransfer)
end_with_parent()
