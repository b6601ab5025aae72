"""The worker's side of a group (`agentrl.engines.vllm.weight_group`): vLLM's own engines, which do not wait for ever.

vLLM's engine waits in NCCL for a trainer, or for another server, that may be gone. These give the group up when the
trainer says so, when its store is gone, or at the deadline; what was begun is finished, and the next group finds a
worker that listens.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferEngine, M2NWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from agentrl.engines.vllm.weight_group import Seat, WeightGroup, find_worker_rank
from agentrl.engines.vllm.weight_receiver import pack_tied_head

TIMEOUT_S = 300.0


@dataclass(kw_only=True)
class _NcclInitInfo(NCCLWeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's, and the seconds that a stage may take."""

    timeout_s: float = TIMEOUT_S


@dataclass(kw_only=True)
class _M2NInitInfo(M2NWeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's, and the seconds that a stage may take."""

    timeout_s: float = TIMEOUT_S


class NcclReceiver(NCCLWeightTransferEngine):  # type: ignore[misc]
    """The worker's end of ``nccl``: one of all workers of all servers."""

    init_info_cls = _NcclInitInfo
    kind = "nccl"
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: _NcclInitInfo) -> None:
        self.shutdown()
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.packed_num_buffers = init_info.packed_num_buffers
        rank = find_worker_rank(self.parallel_config, init_info.rank_offset)
        assert init_info.master_address is not None
        assert init_info.master_port is not None
        seat = Seat(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, timeout_s=init_info.timeout_s
        )
        self._group = WeightGroup.meet(seat)
        self._group.join(self.kind)
        self.model_update_group = self._group

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("init_transfer_engine() comes first")
        _receive(self, self._group, self._take, update_info)

    def _take(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        super().receive_weights(update_info)
        torch.accelerator.synchronize()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
        self.model_update_group = None  # type: ignore[assignment]


class GlooReceiver(NcclReceiver):
    """The same on the CPU, where vLLM's own loop needs CUDA streams: a tensor after the other."""

    kind = "gloo"

    def _take(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        assert self.model_update_group is not None
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast(weight, src=0)
            self.model.load_weights([(name, weight)])

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        pack_tied_head(self.model)


class M2NReceiver(M2NWeightTransferEngine):  # type: ignore[misc]
    """The worker's end of ``nccl_m2n``: of one server's workers and all ranks of the learner."""

    init_info_cls = _M2NInitInfo
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: _M2NInitInfo) -> None:
        self.shutdown()
        super().init_transfer_engine(init_info)
        communicator = self.model_update_group
        seat = Seat("", 0, communicator.rank, communicator.world_size, timeout_s=init_info.timeout_s)
        self._group = WeightGroup(communicator.group.store, seat)
        self._group.adopt(communicator)

    def receive_weights(self, update_info: Any) -> None:
        if self._group is None:
            raise RuntimeError("init_transfer_engine() comes first")
        _receive(self, self._group, self._take, update_info)

    def _take(self, update_info: Any) -> None:
        super().receive_weights(update_info)
        torch.accelerator.synchronize()


def _receive(engine: Any, group: WeightGroup, take: Any, update_info: Any) -> None:
    """Take the weights; where the group is given up meanwhile, finish what was begun, so that others can begin.

    Raises:
        GroupOver: it is given up. The weights are those of no version.
    """
    try:
        with group.watching(group.seat.timeout_s):
            take(update_info)
    except BaseException:
        with suppress(Exception):
            engine.finish_weight_update()
        raise
