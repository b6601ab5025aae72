"""The trainer's side of a group (`agentrl.engines.vllm.weight_group`): vLLM's own sender, to several servers at once.

    vLLM's sender  --calls-->  FleetClient  --each in a thread, with a deadline-->  the servers
          |
          '------tensors--->  all their workers: one broadcast

vLLM's sender knows one client and one world; here the client is all servers, each of which is told where its own
workers begin. A call that one of them fails gives the group up, so that nobody waits for it in a broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import httpx2

from agentrl.engines.vllm.transfer_backend import GLOO
from agentrl.engines.vllm.weight_client import HttpTransferClient, SyncDeadline
from agentrl.engines.vllm.weight_group import GroupOver, Seat, WeightGroup, place_servers
from agentrl.engines.vllm.weight_sender import PolicyWeights

GRACE_S = 5.0  # for servers to answer once the group is given up
PACKED_BYTES = 1 << 28  # of tensors that are broadcast together


class GroupBroken(Exception):
    """A stage failed at some servers.

    Args:
        lost: the numbers of those that are gone or hang, with a sentence each.
        refused: those that answered by an error: their own, or that of one that is gone.
    """

    def __init__(self, lost: dict[int, str], refused: dict[int, str]) -> None:
        super().__init__("; ".join([*lost.values(), *refused.values()]))
        self.lost, self.refused = lost, refused


@dataclass(frozen=True)
class Member:
    """A server of a group.

    Args:
        workers: how many processes with a GPU it has.
    """

    client: HttpTransferClient
    workers: int


class FleetClient:
    """The `TransferClient` of several servers: each call goes to all at once, and returns when all have answered.

    Args:
        on_failure: called with a reason before the failed call raises GroupBroken.
    """

    def __init__(self, members: Sequence[Member], deadline: SyncDeadline, on_failure: Callable[[str], None]) -> None:
        self._members, self._deadline, self._on_failure = members, deadline, on_failure
        self._offsets, self.world_size = place_servers([m.workers for m in members])
        self.broken = Future[GroupBroken]()  # for whoever waits for a sender that hangs

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        infos = [{**init_info, "rank_offset": offset} for offset in self._offsets]
        calls = [
            partial(member.client.init_weight_transfer_engine, info)
            for member, info in zip(self._members, infos, strict=True)
        ]
        self._call_each("/init_weight_transfer_engine", calls, self._deadline.connect_s)

    def start_weight_update(self) -> None:
        self._call_each("/start_weight_update", [m.client.start_weight_update for m in self._members])

    def update_weights(self, update_info: object) -> None:
        calls = [partial(m.client.update_weights, update_info) for m in self._members]
        self._call_each("/update_weights", calls)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        calls = [partial(m.client.finish_weight_update, weight_version) for m in self._members]
        self._call_each("/finish_weight_update", calls)

    def receive_adapter(self, message: str) -> list[str]:
        raise NotImplementedError("an adapter goes to each server by itself")

    def _call_each(self, stage: str, calls: Sequence[Callable[[], None]], seconds: float | None = None) -> None:
        tasks = [_start(call) for call in calls]
        finished = wait(tasks, timeout=seconds or self._deadline.stage_s, return_when=FIRST_EXCEPTION)
        if not finished.not_done and not any(task.exception() for task in tasks):
            return
        self._on_failure(f"{stage} failed")
        wait(tasks, timeout=GRACE_S)
        lost, refused = dict[int, str](), dict[int, str]()
        for number, (task, member) in enumerate(zip(tasks, self._members, strict=True)):
            if not task.done():
                lost[number] = self._deadline.describe_miss(stage)
            elif (error := task.exception()) is not None:
                refuses = isinstance(error, httpx2.HTTPStatusError)
                (refused if refuses else lost)[number] = _describe(member.client, error)
        broken = GroupBroken(lost, refused)
        if not self.broken.done():
            self.broken.set_result(broken)
        raise broken


class GroupSender:
    """A `WeightSender` to all servers of a fleet. All its methods but `abort` run in one thread.

    Args:
        backend: ``nccl``, or its twin ``gloo``.
        deadline: of a stage.
    """

    def __init__(self, backend: str, members: Sequence[Member], weights: PolicyWeights, deadline: SyncDeadline) -> None:
        self.client = FleetClient(members, deadline, self.abort)
        self._backend, self._weights, self._deadline = backend, weights, deadline
        self._group: WeightGroup | None = None
        self._engine: Any = None

    def connect(self, address: str, port: int) -> None:
        """Meet the workers of all servers at an address of this machine.

        Raises:
            GroupBroken: servers have not come.
            GroupOver: the group was given up.
        """
        seat = Seat(address, port, 0, self.client.world_size, self._deadline.connect_s)
        self._group = WeightGroup.meet(seat)
        init = _start(lambda: self.client.init_weight_transfer_engine(self._build_init_info(seat)))
        try:
            self._group.join(self._backend)
        except GroupOver:
            init.result()  # raises what has failed
            raise
        init.result()
        self._engine = self._build_engine()

    def _build_init_info(self, seat: Seat) -> dict[str, object]:
        """Build what vLLM's ``NCCLTrainerWeightTransferEngine.trainer_init`` sends, and the seconds of a stage."""
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

        info = NCCLWeightTransferInitInfo(
            master_address=seat.address,
            master_port=seat.port,
            rank_offset=1,  # of the first server; each is told its own
            world_size=seat.world_size,
            packed=True,
            packed_buffer_size_bytes=PACKED_BYTES,
        )
        return {**worker_init_payload(info), "timeout_s": seat.timeout_s}

    def _build_engine(self) -> Any:
        assert self._group is not None
        engine = _import_engine(self._backend)(
            client=self.client, source=self._weights, packed=True, packed_buffer_size_bytes=PACKED_BYTES
        )
        engine.model_update_group = self._group
        return engine

    def send_weights(self) -> None:
        """Send the weights: start, update and finish at all servers.

        Raises:
            GroupBroken: a stage failed at some of them.
            GroupOver: the group was given up.
        """
        assert self._group is not None
        with self._group.watching(4 * self._deadline.stage_s):
            self._engine.send_weights()

    def abort(self, reason: str = "given up by the trainer") -> None:
        """Give the group up: whoever waits in it is let go."""
        if self._group is not None:
            self._group.give_up(reason)

    def shutdown(self) -> None:
        self.abort("closed")


def _import_engine(backend: str) -> Any:
    """Import vLLM's sender; for the CPU, where its loop needs CUDA streams, one with another loop."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    if backend != GLOO:
        return NCCLTrainerWeightTransferEngine

    class Twin(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
        def _broadcast(self, source: Any, meta: Any) -> None:
            for _, tensor in self._checked_iter(source, meta):
                self.model_update_group.broadcast(tensor.contiguous(), src=0)

    return Twin


def _start(call: Callable[[], None]) -> Future[None]:
    """Start a call in a thread that nobody has to wait for."""
    future = Future[None]()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="agentrl weights call", daemon=True).start()
    return future


def _describe(client: HttpTransferClient, error: BaseException) -> str:
    return client.failure.result() if client.failure.done() else f"could not be given weights ({error})"
