# ruff: noqa: E402  vLLM warns as it is imported
"""The words to vLLM's workers, read by vLLM's own dataclasses and engines: `make vllm`. Nothing here needs a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from agentrl.engines.vllm import launch

launch.import_vllm()  # without its warnings

from vllm.distributed.weight_transfer import m2n_trainer
from vllm.distributed.weight_transfer.m2n_common import M2NMesh, resolve_layout, validate_layout
from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

from agentrl.engines.vllm import m2n_sender
from agentrl.engines.vllm.group_receiver import GlooReceiver, M2NReceiver, NcclReceiver
from agentrl.engines.vllm.group_sender import FleetClient, GroupSender, Member
from agentrl.engines.vllm.m2n_sender import M2NSender, build_init_info, find_m2n_problem
from agentrl.engines.vllm.transfer_backend import NCCL
from agentrl.engines.vllm.weight_client import SyncDeadline
from agentrl.engines.vllm.weight_group import Seat, find_worker_rank
from agentrl.engines.vllm.weight_sender import PolicyWeights
from tests.helpers.causal_lms import subject
from tests.helpers.tiny import qwen3

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("one_thread")]
DEADLINE = SyncDeadline(10.0, 0, NCCL)
CUTS = range(1, 9)


class Client:
    """The client of a server: it keeps what it is sent."""

    def __init__(self) -> None:
        self.calls = list[tuple[str, Any]]()

    def init_weight_transfer_engine(self, info: dict[str, object]) -> None:
        self.calls.append(("init", info))

    def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    def update_weights(self, info: Any) -> None:
        self.calls.append(("update", info))

    def finish_weight_update(self, version: str | None = None) -> None:
        self.calls.append(("finish", version))


def make(receiver: Any) -> Any:
    """An engine of a worker, without a worker."""
    engine = receiver.__new__(receiver)
    engine._group = engine.model_update_group = None
    return engine


def list_ranks(info: Any, copies: int, cut: int) -> list[int]:
    parallels = [
        SimpleNamespace(data_parallel_index=copy, world_size=cut, rank=rank)
        for copy in range(copies)
        for rank in range(cut)
    ]
    return [find_worker_rank(parallel, info.rank_offset) for parallel in parallels]


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
@pytest.mark.parametrize("receiver", [NcclReceiver, GlooReceiver])
def test_each_worker_of_each_server_is_one_rank_of_the_one_group(servers: int, receiver: Any) -> None:
    for cut in CUTS:
        for copies in (1, 2):
            shapes = [(copies, cut), (1, 1), (1, cut), (2, 4)][:servers]
            members = [Member(Client(), a * b) for a, b in shapes]  # type: ignore[arg-type]
            sender = GroupSender(NCCL, members, PolicyWeights(qwen3()), DEADLINE)
            seat = Seat("10.0.0.1", 29600, 0, sender.client.world_size, 12.5)
            sender.client.init_weight_transfer_engine(sender._build_init_info(seat))
            ranks = [0]
            for member, shape in zip(members, shapes, strict=True):
                ((name, told),) = member.client.calls  # type: ignore[attr-defined]
                info = make(receiver).parse_init_info(told)
                assert (name, info.master_address, info.master_port, info.timeout_s) == (
                    "init",
                    "10.0.0.1",
                    29600,
                    12.5,
                )
                assert (info.packed, info.world_size) == (True, sender.client.world_size)
                ranks += list_ranks(info, *shape)
            assert ranks == list(range(sender.client.world_size))


class Wire:
    """A communicator that keeps what goes over it."""

    def __init__(self) -> None:
        self.sent = list[Tensor]()
        self.rank, self.world_size, self.disabled, self.device = 0, 2, False, torch.device("cpu")
        self.comm = SimpleNamespace(value=1)
        self.ended = False

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        self.sent.append(tensor.clone())

    def destroy(self) -> None:
        self.ended, self.disabled = True, True


def test_a_round_is_vllms_own_start_update_finish_with_each_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, members, wire = qwen3(), [Member(Client(), 1), Member(Client(), 2)], Wire()  # type: ignore[arg-type]
    sender = GroupSender("gloo", members, PolicyWeights(model), DEADLINE)

    def join(group: Any, kind: str) -> None:
        group.adopt(wire)

    monkeypatch.setattr("agentrl.engines.vllm.weight_group.WeightGroup.join", join)
    sender.connect("127.0.0.1", 0)
    sender.send_weights()
    for member in members:
        names = [name for name, _ in member.client.calls]  # type: ignore[attr-defined]
        assert names == ["init", "start", "update", "finish"]
        info = NCCLWeightTransferUpdateInfo(**member.client.calls[2][1])  # type: ignore[attr-defined]
        assert list(zip(info.names, map(tuple, info.shapes), strict=True)) == [
            (n, tuple(t.shape)) for n, t in PolicyWeights(model)
        ]
    assert all(torch.equal(a, b) for a, (_, b) in zip(wire.sent, PolicyWeights(model), strict=True))
    sender.shutdown()
    assert wire.ended


def test_all_servers_are_called_at_once() -> None:
    together = threading.Barrier(3)

    class Waits(Client):
        def start_weight_update(self) -> None:
            together.wait(30)

    FleetClient([Member(Waits(), 1) for _ in range(3)], DEADLINE, print).start_weight_update()  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_m2n_counts_the_learners_ranks_and_then_one_servers_workers(ranks: int) -> None:
    names = ["a", "b"]
    for cut in CUTS:
        for copies in range(1, 5):
            infos = [build_init_info(rank, ranks, (copies, cut), "10.0.0.1", 29600) for rank in range(ranks)]
            assert [i.rank for i in infos] == list(range(ranks))
            assert {i.world_size for i in infos} == {ranks + copies * cut}
            assert {i.destination_mesh_dims for i in infos} == {(copies, cut)}
            trainer = m2n_trainer.M2NTrainerWeightTransferEngine.__new__(m2n_trainer.M2NTrainerWeightTransferEngine)
            trainer._src_mesh = M2NMesh((ranks, 1), 0)
            metas = [m2n_trainer.M2NParamMeta(n, torch.bfloat16, (ranks * cut * 8, 4), (0, -1)) for n in names]
            trainer._metas = metas
            told = {**trainer._worker_init_info(infos[0]), "timeout_s": 12.5}
            info = make(M2NReceiver).parse_init_info(told)
            assert [*range(ranks), *list_ranks(info, copies, cut)] == list(range(info.world_size))
            for meta in metas:
                validate_layout(*resolve_layout(trainer._src_mesh, meta.placements), meta.shape, "source")
                destination = M2NMesh((copies, cut), ranks)
                validate_layout(*resolve_layout(destination, (-1, 0)), meta.shape, "destination")


def test_m2n_refuses_what_vllm_cannot_take_before_anything_waits() -> None:
    model = qwen3()
    assert find_m2n_problem(model, 1) == ""
    assert find_m2n_problem(model, 2) == ""
    assert "no multiple of the learner's 7 processes" in find_m2n_problem(model, 7)
    assert "16 shards" in find_m2n_problem(model, 32)
    assert "experts are fused" in find_m2n_problem(subject("qwen3_moe"), 2)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """vLLM's sender of m2n with a wire for NVIDIA's library."""
    wire = Wire()

    def reshard(shard: Tensor, *arguments: Any, **layout: Any) -> None:
        wire.sent.append(shard.clone())

    library = SimpleNamespace(
        Handle=SimpleNamespace(create=lambda config: SimpleNamespace(destroy=lambda: None)),
        Config=lambda max_cta: None,
        reshard=reshard,
        Mesh=lambda dims, start_rank: (dims, start_rank),
        Replicate=lambda: "replicate",
        Shard=lambda dim: dim,
    )
    engine = m2n_trainer.M2NTrainerWeightTransferEngine
    monkeypatch.setattr(m2n_trainer, "import_m2n", lambda: library)
    monkeypatch.setattr(m2n_trainer, "trainer_init", lambda info, rank: wire)
    monkeypatch.setattr(engine, "_receive_destination_plan", lambda self, first: [None] * len(self._metas))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return wire


def test_m2n_sends_a_whole_policys_tensors_by_vllms_own_sender(wire: Wire) -> None:
    model, client = qwen3(), Client()
    sender = M2NSender(client, PolicyWeights(model), (1, 4), lambda: nullcontext(("10.0.0.1", 29600)), DEADLINE)  # type: ignore[arg-type]
    sender.send_weights()
    sender.shutdown()
    assert [name for name, _ in client.calls] == ["init", "start", "update", "finish"]
    info = M2NWeightTransferEngine.init_info_cls(**{k: v for k, v in client.calls[0][1].items() if k != "timeout_s"})
    assert (info.rank_offset, info.world_size, info.src_mesh_dims, info.dst_mesh_dims) == (1, 5, [1, 1], [1, 4])
    assert info.names == [n for n, _ in PolicyWeights(model)]
    assert all(torch.equal(a, b) for a, (_, b) in zip(wire.sent, PolicyWeights(model), strict=True))
    assert m2n_sender._engines == {}


def test_m2n_that_blocks_is_aborted_at_its_deadline(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(wire, "destroy", released.set)
    monkeypatch.setattr(
        m2n_trainer.M2NTrainerWeightTransferEngine, "_send", lambda self: released.wait(60) and self.nothing
    )
    quick = SyncDeadline(0.1, 0, NCCL)
    sender = M2NSender(Client(), PolicyWeights(qwen3()), (1, 1), lambda: nullcontext(("127.0.0.1", 1)), quick)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"learner process 0: took more than 0.3 s"):
        sender.send_weights()
    assert released.is_set()
