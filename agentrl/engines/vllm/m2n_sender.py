"""The trainer's side of vLLM's backend ``nccl_m2n``: each rank of the learner sends its own shards, and none gathers.

One group holds all ranks of the learner and the workers of one server, as vLLM's init info describes it: servers get
the weights one after the other. Before the policy is in shards, rank 0 is all ranks. What rank 0 begins, the others
are asked to take part in; each has a deadline, after which it gives up its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.engines.vllm.weight_client import SyncDeadline
from agentrl.engines.vllm.weight_sender import PolicyWeights, TransferClient
from agentrl.learner.lent_weights import Errand, LentWeights
from agentrl.models.checkpoint_layers import iterate_layers
from agentrl.models.lm_head import unwrap_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

MAX_DIMENSIONS, MAX_SHARDS = 3, 16  # of a tensor, and that feed a worker's whole tensor: vLLM's own limits
GRACE_S = 6.0  # for a communicator to let go; vLLM's waits 5 s
Meet = Callable[[], AbstractContextManager[tuple[str, int]]]
_numbers = itertools.count()
_engines = dict[int, Any]()  # vLLM's senders in this process, by their numbers
_clients = dict[int, TransferClient]()  # in rank 0


def find_m2n_problem(model: PreTrainedModel | PeftModel, ranks: int) -> str:
    """Find why a model's shards cannot be sent as they are; nothing where they can."""
    plain = unwrap_model(model)
    own = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    layers = iterate_layers(plain, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    sent = {name: tuple(tensor.shape) for layer in layers for name, tensor in layer.items()}
    if other := sorted(own.keys() ^ sent.keys()):
        return f"{other[0]} is held in another form than checkpoints have it (experts are fused)"
    if ranks > MAX_SHARDS:
        return f"vLLM takes {MAX_SHARDS} shards of a tensor at most, and the learner has {ranks} processes"
    for name, shape in own.items():
        if not 1 <= len(shape) <= MAX_DIMENSIONS:
            return f"{name} has {len(shape)} dimensions, and vLLM takes 1 to {MAX_DIMENSIONS}"
        if ranks > 1 and shape[0] % ranks:
            return f"{name} has {shape[0]} rows, no multiple of the learner's {ranks} processes"
    return ""


class M2NSender:
    """A `WeightSender` to one server.

    Args:
        shape: the server's workers: copies of the model, and those that share one.
        meet: reserves an address and a port of this machine.
        deadline: of a stage.
    """

    def __init__(
        self, client: TransferClient, weights: PolicyWeights, shape: tuple[int, int], meet: Meet, deadline: SyncDeadline
    ) -> None:
        self._client, self._weights, self._shape, self._meet = client, weights, shape, meet
        self._deadline = deadline
        self._open()

    def _open(self) -> None:
        self._lender, self._number = self._weights.lender, next(_numbers)
        _clients[self._number] = self._client
        with self._meet() as (address, port):
            self._run(_Open(self._number, self._deadline.connect_s, address, port, self._shape))

    def send_weights(self) -> None:
        """Send the weights.

        Raises:
            RuntimeError: a rank of the learner could not send its part, or took too long.
        """
        if self._weights.lender is not self._lender:  # the policy is in shards by now
            self.shutdown()
            self._open()
        self._run(_Send(self._number, 3 * self._deadline.stage_s))

    def shutdown(self) -> None:
        self._run(_Close(self._number, GRACE_S))
        _clients.pop(self._number, None)

    def _run(self, errand: _Errand) -> None:
        problems = [errand.do(self._weights, 0)] if self._lender is None else self._lender.run_errand(errand)
        if any(problems):
            raise RuntimeError("; ".join(f"learner process {r}: {p}" for r, p in enumerate(problems) if p))


@dataclass(frozen=True)
class _Errand(Errand):
    """Something that all ranks do at once, each within a deadline."""

    number: int
    seconds: float

    def run(self, lent: LentWeights) -> list[str]:
        """Run this process's part; return each one's problem, or nothing."""
        return lent.process_group.all_gather(self.do(lent, lent.process_group.rank))

    def do(self, weights: PolicyWeights | LentWeights, rank: int) -> str:
        """Run it in a thread on this process's GPU. Return the problem, or nothing."""
        problems = list[str]()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        thread = Thread(
            target=self._act_on, args=(device, weights, rank, problems), name="agentrl nccl_m2n", daemon=True
        )
        thread.start()
        thread.join(self.seconds)
        if thread.is_alive():
            self._give_up()
            thread.join(GRACE_S)
            problems.insert(0, f"took more than {self.seconds:.3g} s")
        return problems[0] if problems else ""

    def _act_on(self, device: int | None, weights: PolicyWeights | LentWeights, rank: int, problems: list[str]) -> None:
        """Act on a GPU; a new thread has another one. Note what fails."""
        try:
            if device is not None:
                torch.cuda.set_device(device)
            self.act(weights, rank)
        except Exception as error:
            problems.append(str(error).strip() or type(error).__name__)

    def act(self, weights: PolicyWeights | LentWeights, rank: int) -> None:
        """Act on what is asked for."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Abort the communicator, so that what waits in it ends."""
        engine = _engines.get(self.number)
        if engine is not None and engine.group is not None:
            engine.group.destroy()


@dataclass(frozen=True)
class _Open(_Errand):
    address: str
    port: int
    shape: tuple[int, int]

    def act(self, weights: PolicyWeights | LentWeights, rank: int) -> None:
        from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerWeightTransferEngine

        ranks = weights.process_group.world_size if isinstance(weights, LentWeights) else 1
        client = _TimedClient(_clients[self.number], self.seconds) if rank == 0 else None
        _engines[self.number] = M2NTrainerWeightTransferEngine.trainer_init(
            build_init_info(rank, ranks, self.shape, self.address, self.port),
            client=client,
            source=build_source(weights),
        )


@dataclass(frozen=True)
class _Send(_Errand):
    def act(self, weights: PolicyWeights | LentWeights, rank: int) -> None:
        _engines[self.number].send_weights()


@dataclass(frozen=True)
class _Close(_Errand):
    def act(self, weights: PolicyWeights | LentWeights, rank: int) -> None:
        engine = _engines.pop(self.number, None)
        if engine is None:
            return
        with suppress(Exception):
            if engine.group is not None and not engine.group.disabled:
                engine.shutdown()


class _TimedClient:
    """A client that tells the worker the seconds of a stage too."""

    def __init__(self, client: TransferClient, seconds: float) -> None:
        self._client, self._seconds = client, seconds

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self._client.init_weight_transfer_engine({**init_info, "timeout_s": self._seconds})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def build_init_info(rank: int, ranks: int, shape: tuple[int, int], address: str, port: int) -> Any:
    """Build vLLM's ``M2NTrainerInitInfo`` of a rank: the learner's ranks, then the server's workers."""
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

    copies, workers = shape
    return M2NTrainerInitInfo(
        rank=rank,
        master_address=address,
        master_port=port,
        world_size=ranks + copies * workers,
        num_trainer_ranks=ranks,
        dst_mesh_dims=(copies, workers),
    )


def build_source(weights: PolicyWeights | LentWeights) -> Any:
    """Build the source that vLLM's sender reads: this process's shards, in the types that the engine has.

    Of a policy that is whole, they are its tensors.
    """
    from vllm.distributed.weight_transfer.m2n_common import REPLICATED, M2NMesh, M2NParamMeta
    from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource, M2NWeightSource, placements_from_tensor

    if isinstance(weights, LentWeights):
        shards, ranks = weights.shards, weights.process_group.world_size
        model = unwrap_model(shards.policy)

        class Shards(DTensorModuleSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                named = model.named_parameters()
                return [
                    M2NParamMeta(n, shards.describe(p).dtype, tuple(p.shape), placements_from_tensor(p))
                    for n, p in named
                ]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, parameter in model.named_parameters():
                    yield name, shards.read_part(parameter).to(shards.device)

        return Shards(model, ranks)

    whole = weights

    class Whole(M2NWeightSource):  # type: ignore[misc]
        def mesh(self) -> Any:
            return M2NMesh((1, 1), 0)

        def metadata(self) -> list[Any]:
            return [M2NParamMeta(m.name, m.dtype, m.shape, REPLICATED) for m in whole.metadata]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(whole)

    return Whole()
