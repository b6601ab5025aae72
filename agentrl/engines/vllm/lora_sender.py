"""An adapter to vLLM: its matrices alone, into the slot that every request names. The base model stays as it is.

A call of the worker takes them (`agentrl.engines.worker.Extension`), whatever the backend that whole models travel by:
an adapter is small. The requests name the slot and never ask for its files to be read again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from torch import Tensor

from agentrl.engines import transfer
from agentrl.engines.transfer import Client, Sender, Weights
from agentrl.errors import UserError
from agentrl.lora import has_adapter

NAME, SLOT = "policy", 1  # of the adapter, in vLLM
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started for
FAR = "far"  # a worker's answer where it cannot read what this process holds


def room(rank: int) -> int:
    """The rank that vLLM is to be started for. Raises UserError where it has none as large."""
    if rank > RANKS[-1]:
        raise UserError(f"lora.rank {rank}: vLLM has adapters of rank {RANKS[-1]} at most")
    return next(r for r in RANKS if r >= rank)


def rank_of(model: Any) -> int:
    """The largest rank in the model's adapter; 0 without one."""
    if not has_adapter(model):
        return 0
    config = model.peft_config[model.active_adapter]
    return int(max([config.r, *config.rank_pattern.values()]))


def weights_of(model: Any) -> Weights:
    """What vLLM is sent of a model: all of it, or its adapter."""
    return AdapterWeights(model) if has_adapter(model) else Weights(model)


def sender(backend: str, client: Client, weights: Weights, **rendezvous: Any) -> Sender:
    """The trainer's end, connected. Raises UserError as `agentrl.engines.transfer.sender` does."""
    if isinstance(weights, AdapterWeights):
        return AdapterSender(client, weights)
    return transfer.sender(backend, client, weights, **rendezvous)


class AdapterWeights(Weights):
    """An adapter's tensors under the names of peft's checkpoints."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        from peft import get_peft_model_state_dict

        yield from get_peft_model_state_dict(self.model, save_embedding_layers=False).items()

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.model.peft_config[self.model.active_adapter].to_dict()
        return found


class AdapterSender:
    """A sibling of the senders that send whole models."""

    def __init__(self, client: Client, weights: AdapterWeights) -> None:
        self._client, self._weights, self._near = client, weights, True

    def send_weights(self) -> None:
        """Raises UserError where the worker does not take this adapter."""
        content, path = (file := self._weights.file()).content(), file.path
        said = FAR
        if self._near and path is not None:
            said = self._told(path=path, digest=sha256(content).hexdigest())
        if said == FAR:
            self._near = False
            said = self._told(tensors=base64.b64encode(content).decode())
        if said:
            raise UserError(f"vLLM does not take the adapter: {said}")

    def shutdown(self) -> None: ...

    def _told(self, **given: str) -> str:
        message = json.dumps({"config": self._weights.config(), **given}, default=_plain)
        return next((said for said in self._client.receive_adapter(message) if said), "")


def _plain(value: Any) -> Any:
    """What JSON has no word for: sets of names, names of kinds."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
