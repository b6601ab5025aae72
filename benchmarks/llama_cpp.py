"""Time llama.cpp on the same model: python benchmarks/llama_cpp.py FILE.gguf --rows 1 16 64

In a venv that has llama-cpp-python (`pip install llama-cpp-python==0.3.36` builds it, for six minutes). One thread,
prompts of 55 tokens, which are read one after the other, then 64 tokens a row, drawn at temperature 1 by its own
sampler, all rows in one batch: what `engines.py --loads batch` asks of the other engines. Tokens sampled a second of
wall time, that of the prompts included.
"""

from __future__ import annotations

import argparse
import random
from time import perf_counter
from typing import Any

import llama_cpp as llama

PROMPT, SAMPLED = 55, 64


def sample_rows(model: Any, rows: int) -> float:
    """Sample all rows; return tokens a second."""
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = rows * (PROMPT + SAMPLED + 16), rows
    settings.n_batch = settings.n_ubatch = max(512, rows)
    settings.n_threads = settings.n_threads_batch = 1
    context = llama.llama_init_from_model(model, settings)
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(0))
    batch, rng = llama.llama_batch_init(max(512, rows), 0, 1), random.Random(rows)
    last = [0] * rows
    begun = perf_counter()
    for row in range(rows):
        decode(context, batch, [(rng.randrange(100, 40_000), place, row) for place in range(PROMPT)])
        last[row] = llama.llama_sampler_sample(chain, context, PROMPT - 1)
    for place in range(PROMPT, PROMPT + SAMPLED - 1):
        decode(context, batch, [(last[row], place, row) for row in range(rows)])
        last = [llama.llama_sampler_sample(chain, context, row) for row in range(rows)]
    seconds = perf_counter() - begun
    llama.llama_batch_free(batch)
    llama.llama_sampler_free(chain)
    llama.llama_free(context)
    return rows * SAMPLED / seconds


def decode(context: Any, batch: Any, tokens: list[tuple[int, int, int]]) -> None:
    """Run tokens (id, place, row) through the model, with logits of each."""
    batch.n_tokens = len(tokens)
    for number, (token, place, row) in enumerate(tokens):
        batch.token[number], batch.pos[number] = token, place
        batch.n_seq_id[number], batch.seq_id[number][0] = 1, row
        batch.logits[number] = 1
    if status := llama.llama_decode(context, batch):
        raise RuntimeError(f"llama.cpp gave up with {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    arguments = parser.parse_args()
    llama.llama_log_set(llama.llama_log_callback(lambda *_: None), None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(arguments.file.encode(), llama.llama_model_default_params())
    for rows in arguments.rows:
        best = max(sample_rows(model, rows) for _ in range(3))
        print(f"{rows:3} rows: {best:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
