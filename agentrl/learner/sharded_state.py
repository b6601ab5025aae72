"""The state of a learner in shards: every process copies its part of each tensor, and reads its part again.

What is saved by some number of processes, any other number goes on with: pieces are cut along the first dimension, and
each process reads the rows that it holds, from whatever files they are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from agentrl.learner.sharding import cut_like
from agentrl.models.saved_tensor import SavedTensor, StagedTensor

AnyTensor = Tensor | SavedTensor


@dataclass
class StagedPieces:
    """Copies on the CPU of a process's pieces of a state's tensors, and the rows at which they begin."""

    rank: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    first_rows: dict[str, int] = field(default_factory=dict)
    _seen: int = 0

    def stage(self, value: Any, name: str) -> Any:
        """Copy this process's pieces of the tensors in a value; return it with a `StagedTensor` for each of them."""
        if isinstance(value, Tensor):
            self._copy(value.detach(), name)
            return StagedTensor(name)
        if isinstance(value, Mapping):
            return {key: self.stage(own, f"{name}/{key}") for key, own in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.stage(own, f"{name}/{index}") for index, own in enumerate(value))
        return value

    def _copy(self, tensor: Tensor, name: str) -> None:
        self._seen += 1
        if isinstance(tensor, DTensor):
            piece, (row, _) = tensor.to_local(), _find_rows(tensor)
            is_mine = _choose_replica(tensor, self._seen) and piece.numel() > 0
        else:  # the same in all
            piece, row, is_mine = tensor, 0, self.rank == 0
        if is_mine:
            self.tensors[name], self.first_rows[name] = piece.to("cpu", copy=True).contiguous(), row


def _choose_replica(tensor: DTensor, number: int) -> bool:
    """Return True in the processes that copy a tensor, where several machines have the same pieces: by turns."""
    coordinate = _find_coordinate(tensor)
    whole = [d for d, placement in enumerate(tensor.placements) if not isinstance(placement, Shard)]
    return all(coordinate[d] == number % tensor.device_mesh.size(d) for d in whole)


def _find_coordinate(tensor: DTensor) -> Sequence[int]:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # every process has a part
    return coordinate


def _find_rows(tensor: DTensor) -> tuple[int, int]:
    """Find the rows of the whole tensor that this process has: the first, and the one behind the last."""
    rows, mesh = tensor.shape[0], tensor.device_mesh
    ((dimension, placement),) = [(d, p) for d, p in enumerate(tensor.placements) if isinstance(p, Shard)]
    if placement.dim != 0:
        raise ValueError(f"a tensor that is cut along dimension {placement.dim}")
    length = -(-rows // mesh.size(dimension))  # as torch.chunk has it: the last ones may have nothing
    first = min(_find_coordinate(tensor)[dimension] * length, rows)
    return first, min(first + length, rows)


def read_like(saved: AnyTensor, own: Tensor) -> Tensor:
    """Return a saved tensor, or the rows of it that this process has of its own one where that is cut."""
    if not isinstance(own, DTensor):
        return saved.read() if isinstance(saved, SavedTensor) else saved
    if not isinstance(saved, SavedTensor):
        return cut_like(saved, own)
    rows = saved.read_rows(*_find_rows(own)).to(own.to_local().device, own.dtype)
    part: Tensor = DTensor.from_local(
        rows, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
    return part


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a saved state into an optimizer; where it steps shards, each process reads its part."""
    parameters = list_stepped([optimizer])

    def read(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor | SavedTensor):
            return value
        return read_like(value, parameter if value.shape == parameter.shape else torch.empty(0))

    entries = {
        index: {n: read(v, parameters[int(index)]) for n, v in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def list_stepped(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """List what the optimizers step, in order."""
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def pair_masters(
    stepped: Sequence[Tensor], names: Mapping[Any, str], state: Mapping[str, Any]
) -> list[tuple[Tensor, AnyTensor]]:
    """Pair what is stepped in single precision with its saved values, where the weights themselves are not those.

    A process alone steps masters of weights in half precision; shards are in single precision, and have none. Either
    begins with the other's.

    Args:
        names: of the policy's own parameters; what is stepped and has none is a master.
        state: that was saved.
    """
    masters, saved = [t for t in stepped if t not in names], state["masters"]
    if bool(masters) == bool(saved):
        return list(zip(masters, saved, strict=True))
    if masters:
        pairs = zip(stepped, state["stepped"], strict=True)
        return [(tensor, state["policy"][name]) for tensor, name in pairs if tensor not in names]
    half = [t for t in stepped if state["policy"][names[t]].dtype.itemsize < 4]
    return list(zip(half, saved, strict=True))
