"""Adapters: they alone are trained, everything else sees one model, and a folder with one is a model like any other."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from agentrl import UserError, evaluate, train
from agentrl.cli import main
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.vllm import lora_sender
from agentrl.engines.vllm.weight_sender import PolicyWeights
from agentrl.errors import ConfigError
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.models import lora, policy
from agentrl.settings.learner import LoraConfig
from agentrl.settings.loader import build_config
from agentrl.types import Sample, SamplingParams
from tests.helpers.tiny import conversation, qwen3, together

SMALL: dict[str, Any] = {
    "steps": 2,
    "rollout": {"tasks_per_step": 4, "group_size": 4},
    "eval": {"final_tasks": 4, "every": 0},
    "learner": {"lr": 1e-2},
}


def adapted(rank: int = 4) -> Any:
    """A model whose adapter does something."""
    model = lora.add_adapter(qwen3(), LoraConfig(rank=rank), "tiny")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


async def test_the_engine_samples_from_the_model_with_its_adapter() -> None:
    model = adapted()
    async with TransformersEngine(model, capacity=4) as engine:
        assert engine._model.fused is not None
        calls = [lambda n=n: conversation(engine, model, n, SamplingParams()) for n in range(4)]
        off = itertools.chain(*await together(*calls))
        assert max(off) < 1e-4


async def test_after_an_update_it_is_the_new_adapter() -> None:
    model = adapted()
    async with TransformersEngine(model) as engine:
        before = await conversation(engine, model, 0, SamplingParams())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        await engine.update_weights(model, 1)
        after = await conversation(engine, model, 1, SamplingParams())
        assert max(before + after) < 1e-4


def sample(ids: list[int], advantage: float) -> Sample:
    return Sample(ids, [0] * 20 + [1] * (len(ids) - 20), [-4.0] * len(ids), [advantage] * len(ids))


def batch() -> list[Sample]:
    return [sample(list(range(3, 40)), 1.0), sample([*range(3, 30), 50, 51], -1.0)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_adapter_alone_is_trained(optimizer: str) -> None:
    model = adapted()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    Learner(model, make_optimizers(model, optimizer, 1e-2), LossSettings(threads=1)).update(batch())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_prefixes_are_shared_with_an_adapter_too() -> None:
    told = []
    for packing in ("prefix", "padded"):
        model = copy.deepcopy(adapted())
        learner = Learner(model, make_optimizers(model, "adamw", 1e-2), LossSettings(threads=1, packing=packing))
        told.append(learner.update(batch()))
    assert told[0] == pytest.approx(told[1], abs=1e-5)


def reference_kl(learner: Learner) -> float:
    return learner.update(batch())["kl"]


@pytest.mark.parametrize("make", [adapted, lambda: lora.add_adapter(qwen3(), LoraConfig(rank=4), "tiny")])
def test_the_reference_is_the_policy_as_it_was_given(make: Any) -> None:
    """An adapter that is trained further is held to where it started, not to the model beneath it."""
    model = make()
    learner = Learner(model, make_optimizers(model, "adamw", 1e-2), LossSettings(threads=1, beta=0.1))
    assert reference_kl(learner) == pytest.approx(0.0, abs=1e-7)
    moved = reference_kl(learner)
    assert moved > 1e-4
    other = make()
    resumed = Learner(other, make_optimizers(other, "adamw", 1e-2), LossSettings(threads=1, beta=0.1))
    with torch.no_grad():
        for n, p in other.named_parameters():
            if "lora_" in n:
                p.add_(0.1)  # what it was given is not what the run began with
    resumed.load(learner.state())
    assert reference_kl(resumed) == pytest.approx(reference_kl(learner), abs=1e-6)


def test_the_reference_follows_an_adapter_where_it_is_synced() -> None:
    model = adapted()
    settings = LossSettings(threads=1, beta=0.1, ref_sync_steps=2)
    learner = Learner(model, make_optimizers(model, "adamw", 1e-2), settings)
    kls = [reference_kl(learner) for _ in range(4)]
    assert kls[0] == pytest.approx(0.0, abs=1e-7)
    assert kls[2] == pytest.approx(0.0, abs=1e-7)
    assert min(kls[1], kls[3]) > 1e-4


def test_a_pass_of_the_reference_leaves_the_policy_as_it_is() -> None:
    model = adapted()
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    Learner(model, make_optimizers(model, "adamw", 0.0), LossSettings(threads=1, beta=0.1)).update(batch())
    for n, p in model.named_parameters():
        assert p.data_ptr() == before[n][0]
        assert torch.equal(p, before[n][1])


def test_weights_are_the_model_without_its_adapter_under_the_names_of_the_plain_model() -> None:
    plain, found = dict(PolicyWeights(qwen3())), dict(PolicyWeights(adapted()))
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor)


def test_what_is_sent_of_an_adapter_is_its_checkpoint(tmp_path: Path) -> None:
    model = adapted()
    weights = lora_sender.select_weights(model)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    (file,) = weights.files()
    found = load(file.read())
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert lora_sender.find_adapter_rank(model) == 4
    assert lora_sender.find_adapter_rank(qwen3()) == 0
    weights.close()


def test_a_rank_is_rounded_up_to_what_vllm_has() -> None:
    assert [lora_sender.choose_max_rank(rank) for rank in (1, 2, 8, 9, 200)] == [1, 8, 8, 16, 256]
    with pytest.raises(UserError, match=r"lora.rank 513: vLLM has adapters of rank 512 at most"):
        lora_sender.choose_max_rank(513)


@pytest.mark.slow
def test_a_run_is_a_model_that_can_be_measured_trained_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, out = (tmp_path / n for n in ("one", "two", "out"))
    train("math-tools", lora={"rank": 4}, run={"dir": str(one)}, **SMALL)
    saved = {f.name for f in (one / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "agentrl.toml"} <= saved
    assert "model.safetensors" not in saved
    assert lora.read_base_model(one / "model") == "nano"
    assert evaluate("math-tools", str(one), tasks=4, out=str(tmp_path / "eval")).episodes == 4
    with pytest.raises(UserError, match=r"has an adapter already; leave lora\.rank out"):
        train("math-tools", str(one), lora={"rank": 4}, run={"dir": str(two)}, **SMALL)
    train("math-tools", str(one), run={"dir": str(two)}, **SMALL)
    assert main(["export", str(two), "--out", str(out)]) == 0
    assert "parameters" in capsys.readouterr().out
    ids = torch.arange(5, 25)[None]
    plain = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(plain(ids).logits, policy.load_policy(str(two)).model(ids).logits, atol=1e-4, rtol=1e-4)
    assert main(["export", str(two), "--out", str(out)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": {"alpha": 8}}, "alpha and targets are of an adapter"),
        ({"lora": {"rank": 0}}, "greater than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config(("test", {"env": "math-tools", **settings}))


def test_layers_that_are_not_there() -> None:
    with pytest.raises(UserError, match=r"lora.targets qproj: .*qproj"):
        lora.add_adapter(qwen3(), LoraConfig(rank=4, targets=("qproj",)), "tiny")
