"""The policy in shards over the learner's processes: torch's ``fully_shard``, a layer at a time (arXiv 2304.11277).

Each process holds a part of every trained and frozen tensor, of its gradient and of what the optimizer keeps of it. A
layer is gathered for its forward and its backward pass, and let go of. The first process also holds the policy whole,
on its own: what engines sample from, and what is written.

    full     each tensor is cut over all processes
    hybrid   over those of a machine, which keeps it whole between them: only gradients go between machines
    none     each process holds everything, and sums gradients
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.errors import UserError
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
        policy: the same one in every process; its parameters become the shards, in single precision or more.
        shape: of the processes: of one dimension to be cut over, or of two, machines and those on each.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel, shape: Sequence[int]) -> None:
        super().__init__()
        self.policy = policy
        model = unwrap_model(policy)
        _check_shardable(model)
        dtype = next(model.parameters()).dtype
        half = dtype.itemsize < 4
        for parameter in policy.parameters() if half else ():
            parameter.data = parameter.data.float()
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if half else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        )
        names = ("machines", "shards") if len(shape) == 2 else ("shards",)
        self.mesh: DeviceMesh = init_device_mesh(model.device.type, tuple(shape), mesh_dim_names=names)
        for layer in find_layers(model):
            fully_shard(layer, mesh=self.mesh, mp_policy=precision)
        fully_shard(self, mesh=self.mesh, mp_policy=precision)
        for module in self.modules():
            if isinstance(module, FSDPModule):  # weights of the loss are of the whole step: gradients are sums
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        assert isinstance(self, FSDPModule)
        self.set_reduce_scatter_unused_params(True)  # an expert that no token of this process went to

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

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the trained parameters one by one; every process has to go through all of them."""
        for name, parameter in self.trained.items():
            yield name, gather_tensor(parameter.detach())


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the modules that are gathered one after the other: transformers' layers, or those of the longest list."""
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inside = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    if layers:
        return [layer for layer in layers if id(layer) not in inside]
    return max((list(m) for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=[])


def _check_shardable(model: PreTrainedModel) -> None:
    """Refuse a model that holds weights in a form that cannot be cut."""
    if whole := next((n for n, p in model.named_parameters() if not p.is_floating_point()), None):
        raise UserError(
            f"learner.sharding: {whole} is quantized, and cannot be cut into shards; set learner.sharding to none"
        )


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


def shard_policy(policy: PreTrainedModel | PeftModel, shape: Sequence[int], *, keep: bool) -> ShardedPolicy:
    """Cut a policy into shards; a copy of it where it is to be kept whole."""
    return ShardedPolicy(copy.deepcopy(policy) if keep else policy, shape)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from its shards; one that is whole stays as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole


def read_local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_optimizer(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
    """Gather an optimizer's state tensor by tensor, on the CPU; every process takes part, and who keeps it gets it."""
    state = optimizer.state_dict()

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        gathered = gather_tensor(value)
        return gathered.to("cpu", copy=True) if keep else None

    entries = {index: {n: whole(v) for n, v in values.items()} for index, values in state["state"].items()}
    return {**state, "state": entries}


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a gathered state into an optimizer of shards: each process takes its part."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def part(value: Any, parameter: Tensor) -> Any:
        if isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
            return cut_like(value, parameter)
        return value

    entries = {
        index: {n: part(v, parameters[int(index)]) for n, v in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def cut_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """Cut a tensor that every process has as a parameter is cut."""
    own = whole.to(parameter.device, parameter.dtype)
    return distribute_tensor(own, parameter.device_mesh, parameter.placements, src_data_rank=None)
