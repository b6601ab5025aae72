"""The policy in shards over the learner's processes: torch's ``fully_shard``, a layer at a time (arXiv 2304.11277).

Each process holds a part of every trained and frozen tensor, of its gradient and of what the optimizer keeps of it. A
layer is gathered for its forward and its backward pass, and let go of. Where an engine samples in the first process,
that one also holds the policy whole, on its own; other engines are lent a layer after the other
(`agentrl.learner.lent_weights`).

    full     each tensor is cut over all processes
    hybrid   over those of a machine, which keeps it whole between them: only gradients go between machines
    none     each process holds everything, and sums gradients
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.errors import UserError
from agentrl.learner.quantized_layers import hold_as_bytes
from agentrl.models.lm_head import unwrap_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

T = TypeVar("T")


class ShardedPolicy(nn.Module):
    """A policy whose parameters are this process's shards. Called with a function, it runs it with them gathered.

    What the function computes are tensors: the layers inside are gathered as they are run, and again for the backward
    pass. Every process has to make the same calls, in the same order.

    Args:
        policy: the same one in every process; its parameters become the shards: those that are trained in single
            precision or more, the others as they are, weights in 4 bits as bytes.
        shape: of the processes: of one dimension to be cut over, or of two, machines and those on each.
        is_offloaded: shards, their gradients and what the optimizer has of them are on the CPU, and are stepped there;
            a layer is copied to the GPU while it is gathered.
    """

    def __init__(
        self, policy: PreTrainedModel | PeftModel, shape: Sequence[int], *, is_offloaded: bool = False
    ) -> None:
        super().__init__()
        self.policy, self._received, self.is_offloaded = policy, set[Tensor](), is_offloaded
        model = unwrap_model(policy)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        half = dtype.itemsize < 4
        dtypes = [parameter.dtype for parameter in policy.parameters()]
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if half else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        )
        names = ("machines", "shards") if len(shape) == 2 else ("shards",)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, tuple(shape), mesh_dim_names=names)
        place = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if is_offloaded else OffloadPolicy()
        for scales in hold_as_bytes(model):
            distributed.broadcast(scales, src=0)
        for part in (*find_layers(model), self):
            self._receive(part, torch.float32 if half else None)
            fully_shard(part, mesh=self.mesh, mp_policy=precision, offload_policy=place)
        self._dtypes = dict(zip(policy.parameters(), dtypes, strict=True))
        for module in self.modules():
            if isinstance(module, FSDPModule):  # weights of the loss are of the whole step: gradients are sums
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        assert isinstance(self, FSDPModule)
        self.set_reduce_scatter_unused_params(True)  # an expert that no token of this process went to

    def _receive(self, part: nn.Module, dtype: torch.dtype | None) -> None:
        """Have a part as the first process has it, on the device of the shards, before it is cut."""
        own = (*part.parameters(), *part.buffers())
        for tensor in own:
            if isinstance(tensor, DTensor) or tensor in self._received:
                continue
            wide = dtype if tensor.requires_grad else None
            tensor.data = tensor.data.to(self.device, wide).contiguous()
            distributed.broadcast(tensor.data, src=0)
            self._received.add(tensor)

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()

    def let_go(self) -> None:
        """Let go of what was gathered: the next pass gathers it anew."""
        assert isinstance(self, FSDPModule)
        self.reshard()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """List the shards that are trained, by the name of the policy's parameter."""
        return {n: p for n, p in self.policy.named_parameters() if p.requires_grad}

    def send(self, parameter: Tensor, receiver: int) -> Tensor | None:
        """Send this process's part of one of the policy's parameters, in the type that it had, to one that gets all.

        Every process has to. Returns the parameter there, and None in the others.
        """
        part, dtype = read_local(parameter.detach()), self._dtypes[parameter]
        if not isinstance(parameter, DTensor):
            return part.to(dtype) if distributed.get_rank() == receiver else None
        return _send_part(part.to(dtype).contiguous(), parameter, receiver)

    def read_part(self, parameter: Tensor) -> Tensor:
        """Return this process's part of one of the policy's parameters, in the type that it had."""
        return read_local(parameter.detach()).to(self._dtypes[parameter])

    def describe(self, parameter: Tensor) -> Tensor:
        """Return a tensor without values like the one that `send` returns."""
        return torch.empty(parameter.shape, dtype=self._dtypes[parameter], device="meta")

    def gather(self) -> Iterator[tuple[str, Tensor | None]]:
        """Send the trained parameters to the first process, one by one; every process has to go through all of them."""
        for name, parameter in self.trained.items():
            yield name, self.send(parameter, 0)


def _send_part(part: Tensor, parameter: DTensor, receiver: int) -> Tensor | None:
    """Send a part to the receiver, which puts those of all processes together; None in the others."""
    (dimension,) = [p.dim for p in parameter.placements if isinstance(p, Shard)]
    mesh, rank = parameter.device_mesh.mesh, distributed.get_rank()
    ranks = [int(r) for r in (mesh if mesh.ndim == 1 else mesh[(mesh == receiver).any(dim=1)][0])]
    if rank not in ranks:  # of a machine that has the same parts
        return None
    if rank != receiver:
        if part.numel():
            distributed.send(part, receiver)
        return None
    whole = torch.empty(parameter.shape, dtype=part.dtype, device=part.device)
    length = -(-whole.shape[dimension] // len(ranks))
    for place, sender in zip(
        torch.split(whole, length, dimension), ranks, strict=False
    ):  # the last ones may have nothing
        if sender == rank:
            place.copy_(part)
        elif place.is_contiguous():
            distributed.recv(place, sender)
        else:
            distributed.recv(buffer := torch.empty_like(place, memory_format=torch.contiguous_format), sender)
            place.copy_(buffer)
    return whole


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the modules that are gathered one after the other: transformers' layers, or those of the longest list."""
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inside = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    if layers:
        return [layer for layer in layers if id(layer) not in inside]
    return max((list(m) for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=[])


def choose_shape(name: str, world_size: int, local_size: int) -> tuple[int, ...] | None:
    """Return the shape of the processes that a ``learner.sharding`` stands for; None where nothing is cut."""
    if name == "none" or world_size == 1:
        return None
    if name == "full" or local_size == world_size:
        return (world_size,)
    if world_size % local_size:
        raise UserError(
            f"learner.sharding hybrid: {world_size} processes are no multiple of the {local_size} on this machine; "
            "set it to full"
        )
    return (world_size // local_size, local_size)


def shard_policy(
    policy: PreTrainedModel | PeftModel, shape: Sequence[int], *, keep: bool, is_offloaded: bool = False
) -> ShardedPolicy:
    """Cut a policy into shards; a copy of it where it is to be kept whole."""
    return ShardedPolicy(copy.deepcopy(policy) if keep else policy, shape, is_offloaded=is_offloaded)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from its shards; one that is whole stays as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole


def read_local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """Cut a tensor that every process has as a parameter is cut."""
    own = whole.to(parameter.device, parameter.dtype)
    return distribute_tensor(own, parameter.device_mesh, parameter.placements, src_data_rank=None)
