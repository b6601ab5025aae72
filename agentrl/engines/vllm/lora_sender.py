"""The trainer's side of sending an adapter to vLLM: its matrices alone, into the slot that every request names.

The base model stays as it is. A call of the worker takes the matrices (`weight_receiver.WorkerExtension`), whatever the
backend that whole models travel by: an adapter is small. Requests name the slot, and never ask for files to be read
again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from agentrl.engines.vllm import weight_sender
from agentrl.engines.vllm.weight_sender import PolicyWeights, TransferClient, WeightSender
from agentrl.errors import UserError
from agentrl.models.checkpoint_layers import Layer, Read, iterate_adapter
from agentrl.models.lora import has_adapter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER_NAME = "policy"  # of the adapter, in vLLM
ADAPTER_SLOT = 1
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started for
UNREADABLE = "far"  # a worker's answer where it cannot read what this process holds


def choose_max_rank(rank: int) -> int:
    """Choose the rank that vLLM is started for.

    Raises:
        UserError: vLLM supports none as large.
    """
    if rank > RANKS[-1]:
        raise UserError(f"lora.rank {rank}: vLLM has adapters of rank {RANKS[-1]} at most")
    return next(r for r in RANKS if r >= rank)


def find_adapter_rank(model: PreTrainedModel | PeftModel) -> int:
    """Find the largest rank in the model's adapter; 0 without one."""
    if not has_adapter(model):
        return 0
    config = model.peft_config[model.active_adapter]
    return int(max([config.r, *config.rank_pattern.values()]))


def select_weights(model: PreTrainedModel | PeftModel) -> PolicyWeights:
    """Select what is sent to vLLM: the whole model, or its adapter."""
    return AdapterWeights(model) if has_adapter(model) else PolicyWeights(model)


def connect_sender(backend: str, client: TransferClient, weights: PolicyWeights) -> WeightSender:
    """Connect the trainer's end. Raises UserError as `weight_sender.connect_weight_sender` does."""
    if isinstance(weights, AdapterWeights):
        return AdapterSender(client, weights)
    return weight_sender.connect_weight_sender(backend, client, weights)


class AdapterWeights(PolicyWeights):
    """An adapter's tensors under the names of peft's checkpoints."""

    def _read(self, read: Read) -> Iterator[Layer]:
        return iterate_adapter(self.model, read)

    def config(self) -> dict[str, Any]:
        """Return peft's settings of the adapter."""
        config: dict[str, Any] = self.model.peft_config[self.model.active_adapter].to_dict()
        return config


class AdapterSender:
    """A `WeightSender` of an adapter."""

    def __init__(self, client: TransferClient, weights: AdapterWeights) -> None:
        self._client, self._weights, self._same_machine = client, weights, True

    def send_weights(self) -> None:
        """Send the adapter.

        Raises:
            UserError: the worker does not take it.
        """
        (file,) = self._weights.files()
        content, path = file.read(), file.path
        refusal = UNREADABLE
        if self._same_machine and path is not None:
            refusal = self._send(path=path, digest=sha256(content).hexdigest())
        if refusal == UNREADABLE:
            self._same_machine = False
            refusal = self._send(tensors=base64.b64encode(content).decode())
        if refusal:
            raise UserError(f"vLLM does not take the adapter: {refusal}")

    def shutdown(self) -> None: ...

    def _send(self, **fields: str) -> str:
        """Send one message; return the reason why a worker refuses it, or nothing."""
        message = json.dumps({"config": self._weights.config(), **fields}, default=_encode)
        return next((refusal for refusal in self._client.receive_adapter(message) if refusal), "")


def _encode(value: object) -> list[str] | str:
    """Encode values that JSON does not have: sets of names, enums."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
