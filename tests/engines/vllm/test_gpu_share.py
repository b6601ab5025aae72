"""One GPU for the learner and vLLM: who is there when, in bytes, and how much of it vLLM takes.

The GPU is a number here: what the learner's tensors and a stand-in for vLLM's process hold together at each event. The
learner, its optimizer's journeys and the engine's order of calls are the real ones.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.engines.factories import auto
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.gpu_share import GIB, choose_gpu_share, count_kept_bytes, divide_gpu
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizer_offload import OptimizerOffload
from agentrl.learner.optimizers import make_optimizers
from agentrl.models.policy import load_policy
from agentrl.resources import leave_out_learner
from agentrl.settings.loader import build_config
from agentrl.training.algorithm import build_learner
from agentrl.types import Sample
from tests.helpers.tiny import qwen3

ROW = Sample([5, 6, 7, 8, 9, 10, 11, 12], [0] * 4 + [1] * 4, [-3.0] * 8, [0.5] * 8)


class Gpu:
    """Bytes of the learner and of vLLM, at each event."""

    def __init__(self, learner: Learner, weights: int, cache: int) -> None:
        self.learner, self.weights, self.cache = learner, weights, cache
        self.engine = {"weights": weights, "kv_cache": cache}
        self.reserved = 0  # by the learner's allocator, for nobody
        self.events: list[str] = []
        self.most = 0

    def note(self, event: str) -> None:
        self.events.append(event)
        self.most = max(self.most, self.learner_bytes() + self.reserved + sum(self.engine.values()))

    def learner_bytes(self) -> int:
        tensors = [*self.learner.policy.parameters()]
        tensors += [p.grad for p in self.learner.policy.parameters() if p.grad is not None]
        policy = set(self.learner.policy.parameters())
        for o in self.learner.optimizers:
            tensors += [p for g in o.param_groups for p in g["params"] if p not in policy]
            tensors += [t for s in o.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
        return sum(t.nbytes for t in tensors if not t.is_shared())

    # vLLM's calls

    async def sleep(self, level: int) -> None:
        self.note("sampled")
        self.engine = {}
        self.note(f"sleep {level}")

    async def wake_up(self, parts: list[str]) -> None:
        for part in parts:
            self.engine[part] = self.weights if part == "weights" else self.cache
            self.note(f"wake {part}")

    async def pause_generation(self, mode: str, clear_cache: bool) -> None: ...
    async def update_weight_version(self, version: str) -> None: ...
    async def reset_prefix_cache(self, reset_running_requests: bool) -> None: ...
    async def resume_generation(self) -> None: ...

    # and those of the learner's process

    def send_weights(self) -> None:
        self.note("transfer")

    def empty_cache(self) -> None:
        self.reserved = 0
        self.note("empty_cache")


def open_gpu(monkeypatch: pytest.MonkeyPatch, *, offloads: bool) -> tuple[Gpu, VLLMEngine, Learner]:
    """A bfloat16 policy, so that there are masters, with its engine on one GPU."""
    torch.manual_seed(0)
    model: Any = qwen3().to(torch.bfloat16)
    learner = Learner(model, make_optimizers(model, "adamw", 1e-3), LossSettings(threads=1, packing="padded"))
    size = sum(p.nbytes for p in model.parameters())
    gpu = Gpu(learner, weights=size, cache=3 * size)
    if offloads:

        def away(tensor: Tensor) -> Tensor:
            if not gpu.events or gpu.events[-1] != "offload":
                gpu.note("offload")
            there: Tensor = tensor.clone().share_memory_()  # type: ignore[no-untyped-call]
            return there

        def home(tensor: Tensor) -> Tensor:
            if gpu.events[-1] != "onload":
                gpu.note("onload")
            return tensor.clone()

        learner.train_state.offload = OptimizerOffload(model, learner.optimizers, away, home)
        learner.train_state.offload.offload()

    def learns(*_: object) -> None:
        gpu.reserved = size // 2  # its peak, which the allocator keeps
        gpu.note("learn")

    learner.optimizers[0].register_step_post_hook(learns)
    engine = VLLMEngine(model)
    monkeypatch.setattr(engine, "_while_alive", lambda work: work)  # it asks vLLM's process for signs of life
    engine._failure = asyncio.get_running_loop().create_future()
    engine._shares_gpu, engine._llm, engine._sender = True, gpu, gpu  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    return gpu, engine, learner


async def step(gpu: Gpu, engine: VLLMEngine, learner: Learner) -> list[str]:
    """A step as `Trainer` makes it; its events."""
    gpu.events.clear()
    await engine.sleep()
    learner.update([ROW])
    await engine.update_weights(learner.policy, learner.version)
    return gpu.events


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_memory_changes_hands_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, engine, learner = open_gpu(monkeypatch, offloads=True)
    for _ in range(2):
        events = await step(gpu, engine, learner)
        first = ["sampled", "sleep 2", "onload", "learn", "offload"]
        rest = ["empty_cache", "wake weights", "transfer", "empty_cache", "wake kv_cache"]
        assert events == [*first, *rest]


@pytest.mark.anyio
async def test_what_offloading_saves_is_room_for_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the weights of 2 bytes a parameter: masters and means are 6 of them, vLLM is 4 here."""
    most = {}
    for offloads in (False, True):
        gpu, engine, learner = open_gpu(monkeypatch, offloads=offloads)
        for _ in range(2):
            await step(gpu, engine, learner)
        most[offloads] = gpu.most / gpu.weights
    assert most[True] == pytest.approx(7.5, abs=0.01)  # while it learns: 1 + 6, and the reserve of a half
    assert most[False] == pytest.approx(1 + 6 + 4, abs=0.01)  # while it samples


@pytest.mark.anyio
async def test_the_base_of_an_adapter_is_kept_asleep_and_other_weights_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, engine, learner = open_gpu(monkeypatch, offloads=False)
    engine._rank = 8
    assert "sleep 1" in await step(gpu, engine, learner)


def config(**given: Any) -> Any:
    return build_config(("test", {"env": "math-tools", **given}))


def model_of(dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.device("meta"):
        return torch.nn.Linear(1 << 15, 1 << 16, bias=False, dtype=dtype)  # 2.1 billion parameters


def test_vllm_gets_what_the_learner_leaves() -> None:
    model, total = model_of(), 80 * GIB
    share = choose_gpu_share(config(**{"learner.optimizer_offload": True}), model, total, None)
    assert share.kept == 4 * GIB
    assert share.share == pytest.approx(1 - 4 / 80 - 0.06, abs=0.001)
    assert str(share) == (
        "vLLM takes 0.89 of the GPU's memory, 71 of 80 GiB, while the learner keeps 4.0 GiB there; engine.gpu_share "
        "sets another share"
    )
    share = choose_gpu_share(config(), model, total, None)
    assert share.kept == 28 * GIB
    assert share.share == pytest.approx(1 - 28 / 80 - 0.06, abs=0.001)
    given = choose_gpu_share(config(), model, total, 0.3)
    assert (given.share, given.chosen) == (0.3, False)
    assert str(given).endswith("; by engine.gpu_share")


def test_what_the_learner_keeps_is_of_what_is_trained() -> None:
    model = model_of()
    assert count_kept_bytes(config(**{"learner.beta": 0.1}), model) == 32 * GIB
    assert count_kept_bytes(config(**{"learner.optimizer": "adamw_8bit"}), model) == 16 * GIB
    assert count_kept_bytes(config(**{"rollout.max_staleness": 1}), model) == (28 + 12) * GIB
    assert count_kept_bytes(config(), model_of(torch.float32)) == 24 * GIB
    model.requires_grad_(False)
    assert count_kept_bytes(config(), model) == 4 * GIB


def test_where_nothing_is_learned_vllm_gets_all_but_the_weights() -> None:
    for given in ({}, {"learner.beta": 0.1}, {"rollout.max_staleness": 2}):
        share = choose_gpu_share(leave_out_learner(config(**given)), model_of(), 24 * GIB, None)
        assert share.kept == 4 * GIB
        assert share.share == pytest.approx(1 - 4 / 24 - 0.06, abs=0.001)


def test_too_little_is_a_sentence_with_ways_out() -> None:
    with pytest.raises(UserError, match=r"0\.00 of the GPU's 24 GiB is too little for vLLM: .* need 0\.22.* keeps 28"):
        choose_gpu_share(config(), model_of(), 24 * GIB, None)
    with pytest.raises(UserError, match=r"learner\.optimizer_offload true keeps"):
        choose_gpu_share(config(), model_of(), 24 * GIB, 0.1)
    assert choose_gpu_share(config(**{"learner.optimizer_offload": True}), model_of(), 24 * GIB, None).share > 0.7


def test_without_a_gpu_there_is_nothing_to_share() -> None:
    assert divide_gpu(config(), torch.nn.Linear(1, 1), None) is None
    with pytest.raises(UserError, match=r"engine\.gpu_share 0\.3 is of a GPU, and the policy is on the cpu"):
        divide_gpu(config(), torch.nn.Linear(1, 1), 0.3)


def test_settings_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"with rollout\.max_staleness 1 it does not wait"):
        config(**{"learner.optimizer_offload": True, "rollout.max_staleness": 1})
    offloads, policy = config(**{"learner.optimizer_offload": True}), load_policy("nano")
    with pytest.raises(ConfigError, match=r"optimizer_offload: the policy is on the CPU, and so is its optimizer"):
        build_learner(offloads, EnvSpec("math-tools"), policy, ProcessGroup())
    on_cpu = config(**{"learner.param_offload": True})
    with pytest.raises(ConfigError, match=r"param_offload: the policy is on the CPU already"):
        build_learner(on_cpu, EnvSpec("math-tools"), policy, ProcessGroup())
    with pytest.raises(UserError, match=r"here --engine auto is the embedded engine: leave it out"):
        auto(policy.model, config(**{"engine.gpu_share": 0.3}), gpu_share=0.3)
    with pytest.raises(ConfigError, match=r"engine\.gpu_share"):
        config(**{"engine.gpu_share": 1.3, "engine.name": "vllm"})
    with pytest.raises(ConfigError, match=r"engine\.gpu_share"):
        config(**{"engine.gpu_share": 0.3, "engine.name": "transformers"})
