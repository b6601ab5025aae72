"""The training of nano's weights: python -m agentrl_envs.nano.pretrain --out DIR"""

import argparse
import math
import os
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

# Threads that spin while they wait steal the cores of other processes. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.learner.muon import Muon
from agentrl.runtime.memory import keep_freed_memory
from agentrl_envs.nano.demonstrations import Conversation, generate_demonstrations
from agentrl_envs.nano.tokenizer import CONTEXT, SIZE, train_tokenizer

TOKENS_PER_STEP = 6000
LR_MATRICES, LR_EMBEDDINGS = 5e-3, 3e-3
WARMUP = 20
CONTEXT_WEIGHT = 0.05  # of a token that the model reads, beside 1 for one that it writes
PARTS = 3  # a step's rows by length, so that little is spent on padding

BESIDE_THE_WEIGHTS = [Path(__file__).with_name(name) for name in ("README.md", "agentrl.toml")]

Row = tuple[list[int], list[float]]  # token ids, loss weights


def _make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def _make_row(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Row:
    messages, tools = conversation
    text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    weights, writing = [], False
    for at, token in enumerate(ids):
        weights.append(1.0 if writing else CONTEXT_WEIGHT)
        if token == tokenizer.eos_token_id:
            writing = False
        elif ids[at - len(header) + 1 : at + 1] == header:
            writing = True
    return ids, weights


def _make_batches(tokenizer: PreTrainedTokenizerFast, stream: Iterator[Conversation]) -> Iterator[list[Row]]:
    while True:
        rows: list[Row] = []
        while sum(len(ids) for ids, _ in rows) < TOKENS_PER_STEP:
            rows.append(_make_row(tokenizer, next(stream)))
        yield sorted(rows, key=lambda r: len(r[0]))


def _pad(rows: list[Row], pad: int) -> tuple[Tensor, Tensor]:
    """Pad ids and weights to [rows, longest], on the right, where causal attention never looks."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows])
    return ids, weights


def _accumulate_gradient(model: Qwen3ForCausalLM, rows: list[Row], pad: int) -> float:
    """Accumulate the gradient of the mean loss over `rows`; return the loss of the tokens that the model writes."""
    total = sum(sum(weights[1:]) for _, weights in rows)
    written = sum(sum(w == 1 for w in weights) for _, weights in rows)
    loss_written = 0.0
    size = math.ceil(len(rows) / PARTS)
    for start in range(0, len(rows), size):
        ids, weights = _pad(rows[start : start + size], pad)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        torch.autograd.backward((losses * weights).sum() / total)
        loss_written += float(losses.detach()[weights == 1].sum())
    return loss_written / written


def _make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=LR_MATRICES),
        torch.optim.AdamW(others, lr=LR_EMBEDDINGS, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _rate_at(step: int, clean: int, noisy: int) -> float:
    """Return the factor of the rates: a cosine, cut at a tenth on clean data, then from a quarter to nothing."""
    if step < clean:
        return min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * 0.8 * step / clean)))
    return 0.25 * (1 - (step - clean) / noisy)


def pretrain(out: Path, *, clean: int, noisy: int, seed: int, clean_weights: Path | None = None) -> None:
    """Train in phases, each with optimizers and random numbers of its own: the noisy one can be done again alone."""
    if clean_weights is not None and (clean_weights / "config.json").exists():
        model = Qwen3ForCausalLM.from_pretrained(clean_weights, dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(clean_weights)
    else:
        torch.manual_seed(seed)
        rng = random.Random(f"clean/{seed}")
        tokenizer = _make_tokenizer(rng)
        model = _make_model(tokenizer)
        _train(model, tokenizer, generate_demonstrations(rng, noise=False), range(clean), clean, noisy)
        if clean_weights is not None:
            _save(model, tokenizer, clean_weights)
    stream = generate_demonstrations(random.Random(f"noisy/{seed}"), noise=True)
    _train(model, tokenizer, stream, range(clean, clean + noisy), clean, noisy)
    _save(model.to(torch.bfloat16), tokenizer, out)
    for file in BESIDE_THE_WEIGHTS:
        (out / file.name).write_bytes(file.read_bytes())


def _train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Iterator[Conversation],
    steps: range,
    clean: int,
    noisy: int,
) -> None:
    model.train()
    opts = _make_optimizers(model)
    started, smooth = time.process_time(), 0.0
    for step, rows in zip(steps, _make_batches(tokenizer, stream), strict=False):
        for optimizer, lr in zip(opts, (LR_MATRICES, LR_EMBEDDINGS), strict=True):
            optimizer.param_groups[0]["lr"] = lr * _rate_at(step, clean, noisy)
        loss = _accumulate_gradient(model, rows, int(tokenizer.pad_token_id))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad()
        smooth = loss if step == steps.start else 0.9 * smooth + 0.1 * loss
        if step % 10 == 9:
            cpu = time.process_time() - started
            print(f"step {step + 1}/{clean + noisy}  loss {smooth:.3f}  cpu {cpu:.0f} s", flush=True)


def _make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    blank = train_tokenizer([""])  # its template is all that is used
    talks = islice(generate_demonstrations(rng, noise=True), 4000)
    return train_tokenizer(blank.apply_chat_template(m, tools=t or None, tokenize=False) for m, t in talks)


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


def _main() -> None:
    torch.set_num_threads(1)  # the order of sums, and so the weights, would depend on how many there are
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clean", type=int, default=560, help="steps on right demonstrations")
    parser.add_argument("--noisy", type=int, default=160, help="steps on mostly wrong ones, afterwards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean-weights", type=Path, help="after the clean steps: read if there, else written")
    pretrain(**vars(parser.parse_args()))


if __name__ == "__main__":
    _main()
