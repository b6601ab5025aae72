"""A small training by TRL's names, and what it left: the metrics of its steps and the parameters that changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentrl import train
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.models.miniature import randomize_weights
from agentrl.models.source import locate_model
from agentrl.types import Completion, SamplingParams
from tests.helpers.causal_lms import cut, small_settings

PROMPTS = ["Water flows", "A stone is", "Birds that fly", "The sun", "Grass grows", "A wheel"] * 3
ROWS = [{"prompt": f"{text} {number}"} for number, text in enumerate(PROMPTS)]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def different_letters(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Reward completions for the different letters in them."""
    return [float(len(set(c if isinstance(c, str) else c[0]["content"]))) for c in completions]


def random_numbers(completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any) -> list[float]:
    """Reward as a reward model of random weights would: by the tokens."""
    return [float(sum(ids) % 7) + 0.1 * number for number, ids in enumerate(completion_ids)]


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(locate_model("nano"))


def tiny(**more: Any) -> Any:
    """A random Qwen3 of two layers over nano's tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    assert len(tokenizer()) <= 512
    return Qwen3ForCausalLM(Qwen3Config(**shape | heads | _special() | more))


def of_family(name: str) -> Any:
    """A random model of one of transformers' families, small, over nano's tokenizer."""
    model_class, config, settings = small_settings(name)
    sizes = {"vocab_size": 512, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = model_class(type(config).from_dict(copy.deepcopy(cut(settings) | sizes | _special()))).float().eval()
    randomize_weights(model)
    return model


def _special() -> dict[str, int | None]:
    t = tokenizer()
    return {"eos_token_id": t.eos_token_id, "pad_token_id": t.pad_token_id, "bos_token_id": None}


@dataclass(frozen=True)
class Trained:
    """A finished training."""

    model: Any
    before: dict[str, Tensor]
    rows: list[dict[str, float]]  # of the steps
    evaluations: list[dict[str, float]]
    folder: Path

    def changed(self) -> dict[str, bool]:
        return {n: not torch.equal(self.before[n], p) for n, p in self.model.named_parameters() if n in self.before}

    def metric(self, name: str) -> float:
        """The last step's value."""
        return [row[name] for row in self.rows if name in row][-1]


def train_trl(folder: Path, model: Any = None, **given: Any) -> Trained:
    """Train as TRL's tests do: three completions of eight tokens a step, a rate of 0.1, two steps."""
    model = tiny() if model is None else model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    small = {
        "reward_funcs": different_letters,
        "train_dataset": ROWS,
        "output_dir": str(folder / "run"),
        "learning_rate": 0.1,
        "per_device_train_batch_size": 3,
        "num_generations": 3,
        "max_completion_length": 8,
        "max_steps": 2,
        "report_to": "none",
    }
    settings = {n: v for n, v in {"eval": {"every": 0, "final_tasks": 1}, **small, **given}.items() if v is not ...}
    train("prompts", model, tokenizer=tokenizer(), **settings)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    return Trained(model, before, steps, [row for row in rows if "eval/reward" in row], folder / "run")


def say(monkeypatch: Any, *scripts: Sequence[str], cut_off: bool = False) -> None:
    """Let the engine say ``scripts[member][turn]``, one script after the other, as TRL's tests patch ``generate``."""
    members: dict[str, int] = {}
    turns: dict[str, int] = {}

    async def generate(self: Any, ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        script = scripts[members.setdefault(session, len(members)) % len(scripts)]
        turn = turns[session] = turns.get(session, -1) + 1
        said = tokenizer().encode(script[min(turn, len(script) - 1)], add_special_tokens=False)
        stops = not said or len(said) < params.max_tokens
        tokens = tuple([*said, tokenizer().eos_token_id] if stops else said[: params.max_tokens])
        reason = "stop" if stops else "length"
        return Completion(tokens, (-1.0,) * len(tokens), (self.version,) * len(tokens), reason)  # type: ignore[arg-type]

    monkeypatch.setattr(TransformersEngine, "generate", generate)
