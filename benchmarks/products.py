"""How much of a CPU's matrix products the embedded engine keeps: python benchmarks/products.py --model FOLDER

One thread, on a model's folder: prompts of 40 tokens, 40 sampled for each, at 1, 16 and 64 rows, with products in
float32 and in bfloat16. In the same run, turn by turn with the engine:

  products   all weight matrices of that model, the output layer's too, times as many rows, in whatever form torch
             multiplies them fastest in: as the model keeps them, transposed, or packed by oneDNN
  memory     at one row, the bytes of all those matrices by the rate at which torch sums up as many

A share is the engine's tokens a second by those that the products, or the memory, alone would allow. Prompts are
computed before the clock starts: the share is of decoding. The best of --repeats counts, of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engines.embedded.batch import Request
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.packed_matrix import PackedMatrix
from agentrl.types import SamplingParams

PROMPT, SAMPLED = 40, 40
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Product = Callable[[Tensor], Tensor]


def time_best(repeats: int, works: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The least seconds of each; they take turns. A work returns its own seconds."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repeats):
        for name, work in works.items():
            best[name] = min(best[name], work())
    return best


def find_weights(model: PreTrainedModel, dtype: torch.dtype) -> list[Tensor]:
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [layer.weight.detach().to(dtype) for layer in layers]


def multiply_all(products: list[Product], inputs: list[Tensor]) -> float:
    start = perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product(x)
    return perf_counter() - start


def list_products(weights: list[Tensor], rows: int) -> dict[str, Callable[[], float]]:
    """One pass through all matrices, in each form."""
    inputs = [torch.randn(rows, w.shape[1]).to(w.dtype) for w in weights]
    forms: dict[str, list[Product]] = {
        "as kept": [lambda x, w=w: linear(x, w) for w in weights],  # type: ignore[misc]
        "transposed": [lambda x, w=w: x @ w for w in (w.T.contiguous() for w in weights)],  # type: ignore[misc]
        "packed": [PackedMatrix(w) for w in weights],
    }
    return {name: lambda products=products: multiply_all(products, inputs) for name, products in forms.items()}  # type: ignore[misc]


def read_memory(weights: list[Tensor]) -> float:
    """Seconds to read all the matrices once."""
    flat = [w.view(torch.int32) if w.dtype == torch.bfloat16 else w for w in weights]
    start = perf_counter()
    for w in flat:
        w.view(torch.float32).amax()
    return perf_counter() - start


class Sampler:
    """The engine at so many rows. Its passes are made here, without an event loop."""

    def __init__(self, model: PreTrainedModel, dtype: str, rows: int) -> None:
        self.engine, self.rows = TransformersEngine(model, capacity=rows, threads=1, dtype=DTYPES[dtype]), rows
        self.turns = 0

    def sample(self) -> float:
        """Seconds of a pass that samples one token of each row."""
        self.turns += 1
        batch = self.engine._batch
        for row in range(self.rows):
            prompt = [5 + row, *range(100, 99 + PROMPT)]
            params = SamplingParams(max_tokens=SAMPLED + 1, seed=row)
            batch.waiting.append(Request(prompt, params, f"{self.turns} {row}", PROMPT))
        with torch.inference_mode():
            batch.admit_waiting()
            self.engine._run_pass()
            start = perf_counter()
            for _ in range(SAMPLED):
                self.engine._run_pass()
            seconds = (perf_counter() - start) / SAMPLED
        batch.remove_finished()
        batch.clear_sessions()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    columns = ["products in", "rows", "engine, tok/s", "products, tok/s", "form", "memory, tok/s", "share"]
    table = Table(*columns, title="one thread; a share is of the products, at one row of the memory")
    for dtype in given.dtypes:
        weights = find_weights(model, DTYPES[dtype])
        for rows in given.rows:
            works = {"engine": Sampler(model, dtype, rows).sample, **list_products(weights, rows)}
            if rows == 1:
                works["memory"] = lambda w=weights: read_memory(w)  # type: ignore[misc]
            best = time_best(given.repeats, works)
            engine, memory = rows / best.pop("engine"), rows / best.pop("memory", float("inf"))
            form = min(best, key=lambda name: best[name])
            products = rows / best[form]
            allowed = memory or products
            cells = [
                f"{engine:.1f}",
                f"{products:.1f}",
                form,
                f"{memory:.1f}" if memory else "",
                f"{engine / allowed:.2f}",
            ]
            table.add_row(dtype, str(rows), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
