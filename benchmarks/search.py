"""How fast the tool search is: python benchmarks/search.py --passages 100000 --concurrent 1 32

Passages of about 60 words, drawn as words are used (few often, many seldom), and queries of 2 to 6 of them, without the
50 that are used most, which stand for the words that the tool leaves out ("the", "who").

  build s      from JSON lines to a corpus, by what `agentrl index` runs; passages/s and the file's size
  queries/s    through the toolset, as a rollout calls it: a thread a query, results as text
  p50, p99 ms  of a query, from the call to its text
  CPU ms       of this process, a query: what cores that others use too leave comparable
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from itertools import accumulate
from pathlib import Path
from time import perf_counter, process_time

import anyio
from agentrl_tools.bm25_index import build_corpus
from agentrl_tools.passages import read_passages
from agentrl_tools.search import Search
from rich.console import Console
from rich.table import Table

VOCABULARY, COMMON = range(50_000), 50
WEIGHTS = list(accumulate(1 / (number + 1) for number in VOCABULARY))


def write(path: Path, passages: int) -> None:
    rng = random.Random(0)
    with path.open("w") as out:
        for number in range(passages):
            drawn = rng.choices(VOCABULARY, cum_weights=WEIGHTS, k=rng.randint(30, 90))
            row = {"id": str(number), "title": f"Page {number}", "text": " ".join(f"w{n}" for n in drawn)}
            out.write(json.dumps(row) + "\n")


async def ask(path: Path, concurrent: int, queries: int) -> tuple[float, list[float]]:
    """Wall seconds of all, and the seconds of each."""
    rng, took = random.Random(1), []
    telling = [weight - WEIGHTS[COMMON - 1] for weight in WEIGHTS[COMMON:]]
    drawn = [rng.choices(VOCABULARY[COMMON:], cum_weights=telling, k=rng.randint(2, 6)) for _ in range(queries)]
    waiting = [" ".join(f"w{n}" for n in words) for words in drawn]
    pattern = Search(path)
    async with pattern.open() as shelf:
        search = pattern.start_episode(shelf).tool_list[0]

        async def one_after_the_other() -> None:
            while waiting:
                query, begun = waiting.pop(), perf_counter()
                await search(query=query)
                took.append(perf_counter() - begun)

        begun = perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(concurrent):
                tasks.start_soon(one_after_the_other)
        return perf_counter() - begun, sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 32])
    given = parser.parse_args()
    table = Table("concurrent", "queries/s", "p50 ms", "p99 ms", "CPU ms", box=None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.db"
        write(Path(folder) / "c.jsonl", given.passages)
        begun = perf_counter()
        count = build_corpus(read_passages([Path(folder) / "c.jsonl"]), path)
        seconds = perf_counter() - begun
        size = path.stat().st_size / 1e6
        Console().print(f"build {seconds:.1f} s, {count / seconds:,.0f} passages/s, {size:.0f} MB")
        for concurrent in given.concurrent:
            begun = process_time()
            wall, took = anyio.run(ask, path, concurrent, given.queries)
            cpu = (process_time() - begun) / given.queries
            row = (given.queries / wall, took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3)
            table.add_row(str(concurrent), f"{row[0]:,.0f}", f"{row[1]:.1f}", f"{row[2]:.1f}", f"{cpu * 1e3:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
