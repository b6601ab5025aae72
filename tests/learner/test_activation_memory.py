"""As many tokens a micro-batch as the memory has room for, by what a model's pass is measured to keep."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agentrl.learner import activation_memory, learner
from agentrl.learner.activation_memory import (
    FEWEST,
    MOST,
    count_affordable_tokens,
    estimate_owed_bytes,
    measure_kept_bytes,
    read_memory,
)
from agentrl.learner.learner import Learner, LossSettings
from agentrl.types import Sample
from tests.helpers.tiny import VOCABULARY, qwen3


def test_what_a_pass_keeps_is_counted_without_the_weights() -> None:
    model = nn.Sequential(nn.Linear(100, 300), nn.Sigmoid(), nn.Linear(300, 10))
    given = torch.randn(50, 100)
    kept = measure_kept_bytes(model, lambda: model(given))
    assert kept == 4 * 50 * (100 + 300)  # the input, and what sigmoid gave: the second layer keeps the same
    with torch.no_grad():
        assert measure_kept_bytes(model, lambda: model(given)) == kept


def test_more_memory_affords_more_tokens_in_powers_of_two() -> None:
    counts = [count_affordable_tokens(1.6 * 2**20, total << 30, total << 29) for total in (1, 4, 8, 16, 32, 64, 640)]
    assert counts == [FEWEST, 256, 512, 1024, 2048, 4096, MOST]
    assert count_affordable_tokens(1.6 * 2**20, 64 << 30, 4 << 30) == 1024  # little of it is free
    assert count_affordable_tokens(1.6 * 2**20, 64 << 30, -1) == FEWEST
    assert count_affordable_tokens(1.6 * 2**20, 64 << 30, 64 << 30, processes=4) == 1024


def test_the_machine_is_read() -> None:
    total, free = read_memory(torch.device("cpu"))
    assert 1 << 28 < free <= total < 1 << 50


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_limit_counts_and_its_file_cache_does_not(tmp_path: Path, version: int) -> None:
    folder = tmp_path if version == 2 else tmp_path / "memory"
    folder.mkdir(exist_ok=True)
    names = [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")][version == 1]
    for name, value in zip(names, (8 << 30, 5 << 30), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "total_" if version == 1 else ""
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {2 << 30}\n")
    assert activation_memory._read_container_limit(tmp_path) == (8 << 30, 3 << 30)
    (folder / names[0]).write_text("max\n")
    assert activation_memory._read_container_limit(tmp_path) == (None, 0)


def test_gradients_and_running_means_are_owed_until_they_are_there() -> None:
    layer = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    assert estimate_owed_bytes([optimizer], list(layer.parameters())) == 100 * 12
    layer(torch.ones(10)).sum().backward()
    optimizer.step()
    assert estimate_owed_bytes([optimizer], list(layer.parameters())) == 100 * 4


def rows() -> list[Sample]:
    found = []
    for seed in range(12):
        ids = torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        found.append(Sample(ids, [0] * 20 + [1] * 40, [-4.0] * 60, [1.0 - seed % 2 * 2.0] * 60))
    return found


def build(model: Any, **settings: Any) -> Learner:
    policy = copy.deepcopy(model)
    return Learner(policy, [torch.optim.SGD(policy.parameters(), lr=0.1)], LossSettings(threads=1, **settings))


@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_a_learner_without_a_limit_cuts_micro_batches_by_the_memory(
    monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    model, sizes = qwen3().eval(), []
    model_bytes = None
    for gigabytes in (64, 0.05):
        monkeypatch.setattr(learner, "read_memory", lambda _, g=gigabytes: (int(g * 2**30), int(g * 2**30)))
        ours = build(model, packing=packing)
        told = ours.update(rows())
        sizes.append(ours.affordable_tokens)
        if model_bytes is None:
            model_bytes = told
        assert told == pytest.approx(model_bytes, abs=1e-4)
    assert sizes[0] == MOST
    assert sizes[1] is not None
    assert FEWEST <= sizes[1] < MOST


def test_a_resumed_learner_keeps_its_limit_and_a_given_one_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "read_memory", lambda _: (1 << 26, 1 << 26))
    model = qwen3().eval()
    ours = build(model)
    ours.update(rows())
    monkeypatch.setattr(learner, "read_memory", lambda _: (1 << 40, 1 << 40))
    again = build(model)
    again.load(ours.state())
    again.update(rows())
    assert again.affordable_tokens == ours.affordable_tokens != MOST
    given = build(model, max_tokens_per_microbatch=300)
    given.update(rows())
    assert given.affordable_tokens is None


@pytest.mark.parametrize("saved_by", [8, None])
def test_a_limit_of_other_processes_is_counted_again(saved_by: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of eight had an eighth of the policy each; and an earlier checkpoint does not say how many they were."""
    monkeypatch.setattr(learner, "read_memory", lambda _: (1 << 26, 1 << 26))
    model = qwen3().eval()
    ours = build(model)
    ours.update(rows())
    state = ours.state() | {"affordable_tokens": MOST, "world_size": saved_by}
    if saved_by is None:
        del state["world_size"]
    again = build(model)
    again.load(state)
    again.update(rows())
    assert again.affordable_tokens == ours.affordable_tokens != MOST


def test_checkpointed_layers_leave_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "read_memory", lambda _: (1 << 27, 1 << 27))
    counts = []
    for checkpointing in (False, True):
        ours = build(qwen3().eval(), gradient_checkpointing=checkpointing)
        ours.update(rows())
        counts.append(ours.affordable_tokens or 0)
    assert counts[1] > counts[0]
