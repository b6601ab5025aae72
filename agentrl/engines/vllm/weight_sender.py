"""The policy's weights to vLLM, through vLLM's own weight transfer API: the trainer's side.

    sender  --tensors-->  worker        how they travel: memory (here), or vLLM's own ipc and nccl on GPUs
      |
    client  --calls---->  vLLM          init, start, update, finish: in process, or over HTTP

A sender drives a round: ``send_weights()``. The backend ``memory`` is ours, for the CPU, where none of vLLM's own works
(and for any worker on this machine): a safetensors file that has no name and lives in memory. A worker that cannot open
it, since it is on another machine, is sent the bytes. The worker's side is `agentrl.engines.worker`.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor

from agentrl.errors import UserError
from agentrl.learner.logprobs import causal_lm
from agentrl.lora import in_full

MEMORY = "memory"
PART = 64 << 20  # bytes of tensors in one call, where they go by the call itself


class Client(Protocol):
    """How one vLLM is told: the four calls that vLLM's own senders make (its ``VLLMWeightSyncClient``), and ours."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def receive_adapter(self, message: str) -> list[str]: ...


class Sender(Protocol):
    """The trainer's end of a backend (vLLM's ``TrainerWeightTransferEngine``)."""

    def send_weights(self) -> None: ...
    def shutdown(self) -> None: ...


class Meta(NamedTuple):
    """vLLM's ``ParamMeta``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """A model's tensors under the names of its checkpoints, tied ones once: vLLM's ``WeightSource``.

    Of a model with an adapter it is the model without it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._file: MemoryFile | None = None

    def replace(self, model: Any) -> None:
        """From now on these are another state's."""
        self.model = model
        self.close()

    def metadata(self) -> list[Meta]:
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        model = causal_lm(self.model)
        held = {n.replace(".base_layer.", "."): in_full(p) for n, p in model.named_parameters() if "lora_" not in n}
        yield from revert_weight_conversion(model, held).items()

    def file(self) -> MemoryFile:
        """A snapshot, taken once for everybody who asks before ``replace``."""
        if self._file is None:
            self._file = MemoryFile({name: t.contiguous().cpu() for name, t in self})
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


class MemoryFile:
    """A safetensors file that has no name: it is gone with this process, whatever ends it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._descriptor = memory_descriptor()
        self.path = None if self._descriptor is None else f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._bytes = save(tensors) if self.path is None else b""
        if self._descriptor is not None:
            with open(self._descriptor, "wb", closefd=False) as file:
                file.write(save(tensors))

    def content(self) -> bytes:
        """The whole file."""
        return self._bytes if self.path is None else Path(self.path).read_bytes()

    def parts(self) -> Iterator[bytes]:
        """The same as safetensors files of about ``PART`` bytes, for whom the path means nothing."""
        tensors = load(self._bytes) if self.path is None else load_file(self.path)
        part: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > PART:
                yield save(part)
                part = {}
            part[name] = tensor
        if part:
            yield save(part)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


class MemorySender:
    """The trainer's end of ``memory``."""

    def __init__(self, client: Client, weights: Weights) -> None:
        self._client, self._weights = client, weights
        self._near = self._introduce()

    def send_weights(self) -> None:
        file = self._weights.file()
        self._client.start_weight_update()
        if self._near:
            self._client.update_weights({"path": file.path})
        else:
            for part in file.parts():
                self._client.update_weights({"tensors": base64.b64encode(part).decode()})
        self._client.finish_weight_update()

    def shutdown(self) -> None: ...

    def _introduce(self) -> bool:
        """Whether the worker can open what this process holds: it is asked to read a word there."""
        descriptor = memory_descriptor()
        if descriptor is not None:
            word = secrets.token_hex(16)
            try:
                os.write(descriptor, word.encode())
                self._client.init_weight_transfer_engine({"path": f"/proc/{os.getpid()}/fd/{descriptor}", "word": word})
                return True
            except Exception:  # a worker that cannot; one that is not there says so again below
                pass
            finally:
                os.close(descriptor)
        self._client.init_weight_transfer_engine({})
        return False


def sender(backend: str, client: Client, weights: Weights, **rendezvous: Any) -> Sender:
    """The trainer's end of a backend, connected. ``rendezvous`` is what vLLM's own backend of that name asks for.

    Raises:
        UserError: the backend needs vLLM here too, and it is not installed.
    """
    if backend == MEMORY:
        return MemorySender(client, weights)
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise UserError(f"weight transfer by {backend!r} needs vLLM beside the trainer: {error}") from None
    infos = {"ipc": IPCTrainerInitInfo, "nccl": NCCLTrainerInitInfo}
    made: Sender = WeightTransferTrainerFactory.trainer_init(
        infos[backend](rank=0, **rendezvous), client=client, source=weights
    )
    return made


def memory_descriptor() -> int | None:
    """A nameless file in memory, where the system has such."""
    return os.memfd_create("agentrl weights") if hasattr(os, "memfd_create") else None
