"""The trainer's side of sending the policy's weights to vLLM, through vLLM's own weight transfer API.

    sender  --tensors-->  worker        by a backend: memory (here), or vLLM's own ipc and nccl on GPUs
      |
    client  --calls---->  vLLM          init, start, update, finish: in process, or over HTTP

``send_weights()`` makes one round. The backend ``memory`` is ours, for the CPU, where none of vLLM's own works (and for
any worker on this machine): a safetensors file without a name, in memory. A worker on another machine, which cannot
open it, is sent the bytes. The worker's side is `agentrl.engines.vllm.weight_receiver`.
"""

from __future__ import annotations

import base64
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor

from agentrl.errors import UserError
from agentrl.models.lm_head import unwrap_model
from agentrl.models.lora import dequantize, describe_dequantized

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

MEMORY = "memory"
PART_BYTES = 64 << 20  # bytes of tensors in one call, where they go by the call itself


class TransferClient(Protocol):
    """The calls to one vLLM: the four that vLLM's own senders make (its ``VLLMWeightSyncClient``), and ours."""

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: object) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def receive_adapter(self, message: str) -> list[str]: ...


class WeightSender(Protocol):
    """The trainer's end of a backend (vLLM's ``TrainerWeightTransferEngine``)."""

    def send_weights(self) -> None:
        """Send the current weights, and return once the worker has loaded them."""
        ...

    def shutdown(self) -> None: ...


class _ParamMeta(NamedTuple):
    """vLLM's ``ParamMeta``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None  # the trainer's ranks that have it: all of them


class _ParamList(list[_ParamMeta]):
    """Names, types and shapes, which vLLM 0.33 reads as ``metadata`` of a source, and 0.32 calls."""

    def __call__(self) -> _ParamList:
        return self


class PolicyWeights:
    """A model's tensors under the names of its checkpoints, tied ones once: vLLM's ``WeightSource``.

    For a model with an adapter, the tensors are those of the model without it.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self.model = model
        self._file: MemoryFile | None = None

    def replace(self, model: PreTrainedModel | PeftModel) -> None:
        """Take the weights from another model, or from another state of this one, from now on."""
        self.model = model
        self.close()

    @property
    def metadata(self) -> _ParamList:
        """List names, types and shapes, without making a tensor."""
        described = self._read(describe_dequantized)
        return _ParamList(_ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in described)

    def count_bytes(self) -> int:
        """Count the bytes of all tensors."""
        return sum(math.prod(param.shape) * param.dtype.itemsize for param in self.metadata)

    def owned_names(self, rank: int) -> list[str]:
        """List what a rank of the trainer has: everything."""
        return [param.name for param in self.metadata]

    def implements_iter_full(self) -> bool:
        """Return True: `iter_full` is there."""
        return True

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and the tensors, each in full."""
        return iter(self)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._read(dequantize)

    def _read(self, read: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and what ``read`` makes of the tensors, a layer after the other.

        What the model holds fused (experts, mostly) is taken apart for one layer at a time.
        """
        from transformers.core_model_loading import revert_weight_conversion

        model = unwrap_model(self.model)
        parameters = {name: p for name, p in model.named_parameters() if "lora_" not in name}
        for layer in _group_by_layer(parameters):
            tensors = {name.replace(".base_layer.", "."): read(parameters[name]) for name in layer}
            yield from revert_weight_conversion(model, tensors).items()

    def file(self) -> MemoryFile:
        """Take a snapshot, once for all calls until ``replace``."""
        if self._file is None:
            self._file = MemoryFile({name: t.contiguous().cpu() for name, t in self})
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


class MemoryFile:
    """A safetensors file in memory, without a name: it is gone with this process, whatever ends it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._descriptor = _open_memory_file()
        self.path = None if self._descriptor is None else f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._bytes = save(tensors) if self.path is None else b""
        if self._descriptor is not None:
            with open(self._descriptor, "wb", closefd=False) as file:
                file.write(save(tensors))

    def content(self) -> bytes:
        """Return the whole file."""
        return self._bytes if self.path is None else Path(self.path).read_bytes()

    def parts(self) -> Iterator[bytes]:
        """Split it into safetensors files of about ``PART_BYTES`` bytes, for a worker that cannot open the path."""
        tensors = load(self._bytes) if self.path is None else load_file(self.path)
        part: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > PART_BYTES:
                yield save(part)
                part = {}
            part[name] = tensor
        if part:
            yield save(part)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


class _MemorySender:
    """The trainer's end of the backend ``memory``."""

    def __init__(self, client: TransferClient, weights: PolicyWeights) -> None:
        self._client, self._weights = client, weights
        self._same_machine = self._test_access()

    def send_weights(self) -> None:
        file = self._weights.file()
        self._client.start_weight_update()
        if self._same_machine:
            self._client.update_weights({"path": file.path})
        else:
            for part in file.parts():
                self._client.update_weights({"tensors": base64.b64encode(part).decode()})
        self._client.finish_weight_update()

    def shutdown(self) -> None: ...

    def _test_access(self) -> bool:
        """Return True if the worker can open this process's files: it is asked to read a word in one."""
        descriptor = _open_memory_file()
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


def connect_weight_sender(
    backend: str, client: TransferClient, weights: PolicyWeights, **rendezvous: object
) -> WeightSender:
    """Connect the trainer's end of a backend. ``rendezvous`` is what vLLM's own backend of that name needs.

    Raises:
        UserError: the backend needs vLLM here too, and it is not installed.
    """
    if backend == MEMORY:
        return _MemorySender(client, weights)
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        raise UserError(f"weight transfer by {backend!r} needs vLLM beside the trainer: {error}") from None
    infos = {"ipc": IPCTrainerInitInfo, "nccl": NCCLTrainerInitInfo}
    sender: WeightSender = WeightTransferTrainerFactory.trainer_init(
        infos[backend](rank=0, **rendezvous), client=client, source=weights
    )
    return sender


def _group_by_layer(names: Iterable[str]) -> Iterable[list[str]]:
    """Group parameters by the layer that they are in, such as ``model.layers.3.``; those in none are one group."""
    layers: dict[str, list[str]] = {}
    for name in names:
        within = re.match(r"\D*\.\d+\.", name)
        layers.setdefault(within.group() if within else "", []).append(name)
    return layers.values()


def _open_memory_file() -> int | None:
    """Open a file without a name in memory; None if the system has no such files."""
    return os.memfd_create("agentrl weights") if hasattr(os, "memfd_create") else None
