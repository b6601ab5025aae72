"""Loaded into vLLM's worker processes: the worker's side of the backend ``memory``, adapters, a watch on the parent.

vLLM is given ``worker_extension_cls="agentrl.engines.worker.Extension"``; that it imports this module is what registers
the backend.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.engines.adapter import FAR, NAME, SLOT
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
    """What vLLM mixes into its worker: calls about adapters."""

    def adapter_room(self) -> str:
        """The largest rank of an adapter here; 0: it was started without."""
        return str(lora.max_lora_rank if (lora := self.vllm_config.lora_config) else 0)  # type: ignore[attr-defined]

    def receive_adapter(self, message: str) -> str:
        """Put an adapter into the slot. Returns why it cannot be, or nothing."""
        given = json.loads(message)
        try:
            tensors = _read(given)
        except OSError:
            return FAR
        if tensors is None:
            return FAR
        with TemporaryDirectory(prefix="agentrl-adapter-") as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(given["config"]))
            Path(folder, "adapter_model.safetensors").write_bytes(tensors)
            try:
                self.add_lora(LoRARequest(NAME, SLOT, folder, load_inplace=True))  # type: ignore[attr-defined]
            except Exception as error:
                return str(error) or type(error).__name__
        return ""


def _read(given: dict[str, str]) -> bytes | None:
    """The tensors' file; nothing where another file has that path here."""
    if "tensors" in given:
        return base64.b64decode(given["tensors"])
    found = Path(given["path"]).read_bytes()
    return found if sha256(found).hexdigest() == given["digest"] else None


WeightTransferEngineFactory.register_engine(MEMORY, MemoryTransfer)
end_with_parent()
