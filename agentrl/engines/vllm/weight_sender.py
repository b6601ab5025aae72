"""The trainer's side of sending the policy's weights to vLLM, through vLLM's own weight transfer API.

    sender  --tensors-->  worker        by a backend: memory (here), or vLLM's own ipc and nccl on GPUs
      |
    client  --calls---->  vLLM          init, start, update, finish: in process, or over HTTP

``send_weights()`` makes one round. The backend ``memory`` is ours, for the CPU, where none of vLLM's own works (and for
any worker on this machine): safetensors files without a name, in memory, a layer or a few in each. A worker on another
machine, which cannot open them, is sent the bytes. The worker's side is `agentrl.engines.vllm.weight_receiver`.
"""

from __future__ import annotations

import base64
import math
import os
import secrets
import threading
from collections.abc import Generator, Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self
from weakref import WeakSet

import anyio
import torch
from torch import Tensor

from agentrl.engines.vllm.transfer_backend import IPC, MEMORY
from agentrl.errors import UserError
from agentrl.models.checkpoint_layers import Layer, Read, iterate_layers
from agentrl.models.lora import dequantize, describe_dequantized
from agentrl.models.memory_file import MemoryFile, open_memory_file, write_layers
from agentrl.runtime.threads import run_in_thread

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


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


class Lender(Protocol):
    """The weights of a policy in shards (`agentrl.learner.lent_weights`)."""

    def describe_layers(self) -> Iterator[Layer]: ...
    def gather_layers(self) -> Generator[Layer]: ...
    def write_files(self) -> list[MemoryFile]: ...
    def run_errand(self, errand: Any) -> list[str]: ...


class _Pass:
    """A pass over layers in one thread, which another one may give up.

    Where it is given up while a layer is gathered, it is closed behind that, by the thread that gathers.
    """

    def __init__(self, layers: Generator[Layer]) -> None:
        self._layers, self._at_work, self._is_over = layers, threading.Lock(), False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Layer:
        with self._at_work:
            layer = next(self._layers)
        if self._is_over:
            self.give_up()
        return layer

    def give_up(self) -> None:
        """End it; its other processes go through what is left."""
        self._is_over = True
        if self._at_work.acquire(blocking=False):
            try:
                self._layers.close()
            finally:
                self._at_work.release()


class PolicyWeights:
    """A model's tensors under the names of its checkpoints, tied ones once: vLLM's ``WeightSource``.

    For a model with an adapter, the tensors are those of the model without it. Those of a policy in shards are the
    ``lender``'s.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self.model = model
        self.device: torch.device | None = None  # that tensors are sent from; by default where they are
        self.lender: Lender | None = None
        self._files: list[MemoryFile] | None = None
        self._lock = threading.Lock()
        self._passes = WeakSet[_Pass]()

    def replace(self, model: PreTrainedModel | PeftModel) -> None:
        """Take the weights from another model, or from another state of this one, from now on."""
        self.model = model
        self.close()

    @property
    def metadata(self) -> _ParamList:
        """List names, types and shapes, without making a tensor."""
        layers = self._read(describe_dequantized) if self.lender is None else self.lender.describe_layers()
        described = chain.from_iterable(layer.items() for layer in layers)
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
        layers: Iterator[Layer]
        if self.lender is None:
            layers = self._read(dequantize)
        else:
            self._passes.add(layers := _Pass(self.lender.gather_layers()))
        for layer in layers:
            yield from ((name, tensor.to(self.device)) for name, tensor in layer.items())

    def _read(self, read: Read) -> Iterator[Layer]:
        """Yield what ``read`` makes of each layer of a model that is whole."""
        return iterate_layers(self.model, read)

    def files(self) -> list[MemoryFile]:
        """Take a snapshot, once for all calls until ``replace``."""
        with self._lock:  # several senders call, each in its thread
            if self._files is None:
                self._files = self._write() if self.lender is None else self.lender.write_files()
            return self._files

    def _write(self) -> list[MemoryFile]:
        return list(write_layers(self._read(dequantize), self._read(describe_dequantized), repeat(True)))

    async def abandon(self) -> None:
        """End the passes over the tensors that somebody began and will not go on with."""
        for begun in list(self._passes):
            with anyio.CancelScope(shield=True):
                await run_in_thread(begun.give_up)  # the learner's processes go through the rest

    def close(self) -> None:
        for file in self._files or ():
            file.close()
        self._files = None


class _MemorySender:
    """The trainer's end of the backend ``memory``."""

    def __init__(self, client: TransferClient, weights: PolicyWeights) -> None:
        self._client, self._weights = client, weights
        self._same_machine = self._test_access()

    def send_weights(self) -> None:
        files = self._weights.files()
        self._client.start_weight_update()
        if self._same_machine:
            self._client.update_weights({"paths": [file.path for file in files]})
        else:
            for file in files:
                self._client.update_weights({"tensors": base64.b64encode(file.read()).decode()})
        self._client.finish_weight_update()

    def shutdown(self) -> None: ...

    def _test_access(self) -> bool:
        """Return True if the worker can open this process's files: it is asked to read a word in one."""
        descriptor = open_memory_file()
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


def connect_weight_sender(backend: str, client: TransferClient, weights: PolicyWeights) -> WeightSender:
    """Connect the trainer's end of a backend to one vLLM: ``memory``, or ``ipc``.

    Raises:
        UserError: the backend needs vLLM here too, and it is not installed.
    """
    if backend == MEMORY:
        return _MemorySender(client, weights)
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    except ImportError as error:
        raise UserError(f"weight transfer by {backend!r} needs vLLM beside the trainer: {error}") from None
    if backend != IPC:
        raise ValueError(f"{backend!r} is no backend of one vLLM alone")
    sender: WeightSender = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(rank=0), client=client, source=weights
    )
    return sender
