"""The worker's side, loaded into vLLM's worker processes: the backend ``memory``, adapters, a watch on the parent.

vLLM is given ``worker_extension_cls="agentrl.engines.vllm.weight_receiver.WorkerExtension"``. Importing this module
registers it, and the backends of `agentrl.engines.vllm.group_receiver`.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors.torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.engines.vllm.lora_sender import ADAPTER_NAME, ADAPTER_SLOT, UNREADABLE
from agentrl.engines.vllm.transfer_backend import GLOO, MEMORY, RECEIVERS
from agentrl.runtime.parent_watch import end_with_parent


@dataclass
class _InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A test of whether this process can open the trainer's files: the one at ``path`` holds ``word``."""

    path: str | None = None
    word: str = ""


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Safetensors files: their paths; or the content of one in base64."""

    paths: list[str] | None = None
    tensors: str | None = None


class _MemoryReceiver(WeightTransferEngine[_InitInfo, _UpdateInfo]):  # type: ignore[misc]
    """The worker's end of the backend ``memory``."""

    init_info_cls = _InitInfo
    update_info_cls = _UpdateInfo

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        if init_info.path is not None and Path(init_info.path).read_text() != init_info.word:
            raise ValueError("the trainer is not on this machine")

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        if update_info.paths is None:
            self._load(safetensors.torch.load(base64.b64decode(update_info.tensors or "")))
        for path in update_info.paths or ():
            self._load(safetensors.torch.load_file(path))

    def _load(self, tensors: dict[str, Tensor]) -> None:
        self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)

    def shutdown(self) -> None: ...


def pack_tied_head(model: nn.Module) -> None:
    """Pack a tied output head again: on the CPU it holds a packed copy of its weights, which is not updated."""
    head = getattr(model, "lm_head", None)
    config = getattr(model, "config", None)
    if head is not None and getattr(config, "tie_word_embeddings", False) and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Methods that vLLM mixes into its worker, for ``collective_rpc``: calls about adapters."""

    def get_max_adapter_rank(self) -> str:
        """Return the largest rank of an adapter here; 0 if vLLM was started without adapters."""
        return str(lora.max_lora_rank if (lora := self.vllm_config.lora_config) else 0)  # type: ignore[attr-defined]

    def get_transfer_backend(self) -> str:
        """Return how weights come here."""
        backend = str(self.vllm_config.weight_transfer_config.backend)  # type: ignore[attr-defined]
        return next((name for name, receiver in RECEIVERS.items() if receiver == backend), backend)

    def finish_interrupted_update(self) -> str:
        """Finish an update that a trainer has begun and left, if there is one: vLLM takes no other before."""
        if interrupted := self._weight_update_active:  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
        return str(interrupted)

    def receive_adapter(self, message: str) -> str:
        """Put an adapter into the slot. Return why it cannot be, or nothing."""
        fields = json.loads(message)
        try:
            tensors = _read_tensors(fields)
        except OSError:
            return UNREADABLE
        if tensors is None:
            return UNREADABLE
        with TemporaryDirectory(prefix="agentrl-adapter-") as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(fields["config"]))
            Path(folder, "adapter_model.safetensors").write_bytes(tensors)
            try:
                self.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_SLOT, folder, load_inplace=True))  # type: ignore[attr-defined]
            except Exception as error:
                return str(error) or type(error).__name__
        return ""


def _read_tensors(fields: dict[str, str]) -> bytes | None:
    """Read the tensors' file; None if another file has that path here."""
    if "tensors" in fields:
        return base64.b64decode(fields["tensors"])
    content = Path(fields["path"]).read_bytes()
    return content if sha256(content).hexdigest() == fields["digest"] else None


WeightTransferEngineFactory.register_engine(MEMORY, _MemoryReceiver)
for name, receiver in (("nccl", "NcclReceiver"), ("nccl_m2n", "M2NReceiver"), (GLOO, "GlooReceiver")):
    WeightTransferEngineFactory.register_engine(RECEIVERS[name], "agentrl.engines.vllm.group_receiver", receiver)
end_with_parent()
