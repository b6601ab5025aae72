"""What a turn of a long episode costs the framework: python benchmarks/long_episodes.py

No model is in the numbers. The tokens are bytes, a tool is called each turn, and a turn is about 254 tokens.

  turns    CPU of a turn over episodes of 10, 50, 200 and 400 turns (102,000 tokens): an engine that answers at once
  over HTTP    turns a second of CPU at contexts of 2,560, 8,000 and 32,000 tokens: the client of vLLM's servers, and a
               server in another process that reads the request and says the same each time

Beside each figure is its ratio to the first: what is flat has 1.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection
from time import process_time
from types import SimpleNamespace
from typing import Any, cast

import anyio
import torch
from rich.console import Console
from rich.table import Table

from agentrl import EnvSpec, ToolEnv, Trajectory, tool
from agentrl.engines.vllm import requests
from agentrl.engines.vllm.server_client import Replica
from agentrl.engines.vllm.weight_client import SyncDeadline
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.testing import STOP, ByteRenderer, call
from agentrl.types import Completion, Observation, SamplingParams

TURNS, CONTEXTS, HTTP_TURNS, AT_ONCE = (10, 50, 200, 400), (2_560, 8_000, 32_000), 20, 8
SAID = (*call("look", place="p" * 60).encode(), STOP)
SEEN = 254 - len(SAID) - 2  # a turn's tokens are what is said, what is seen, and the marks of both


class Looking(ToolEnv):
    """Calls a tool as often as it may."""

    max_turns = 1 << 30

    def __init__(self, context: int = 20) -> None:
        self.context = context

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("x" * self.context), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"turns": float(trajectory.turns)}

    @tool(timeout_s=5)
    async def look(self, place: str) -> str:
        """Look at a place."""
        return "s" * SEEN


class Instant:
    """An engine that says the same at once."""

    capacity, max_context, version = 1 << 30, 1 << 30, 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        return Completion(SAID, (-0.5,) * len(SAID), (0,) * len(SAID), "stop")

    def end_session(self, session: str) -> None: ...


class OverHttp(Instant):
    """The client of one server, as `ServerEngine` uses it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        requests.check_request(token_ids, params, 1 << 20, self.max_context)
        completion, _ = await self.replica.generate(token_ids, params)  # type: ignore[arg-type]
        return completion


async def measure_turn(turns: int, engine: Any, context: int = 20, episodes: int = 1) -> float:
    """Measure the seconds of CPU of a turn, over episodes of so many turns."""
    play = Rollout(
        EnvSpec(Looking, context=context), engine, ByteRenderer(), limits=EpisodeLimits(max_turns=turns, max_tokens=200)
    )
    gc.collect()
    begun = process_time()
    numbers = count()
    async with anyio.create_task_group() as group:
        for _ in range(episodes):
            group.start_soon(play.episode, next(numbers))
    return (process_time() - begun) / (turns * episodes)


def serve(pipe: Connection) -> None:
    """Answer each request with the same turn; tell the port first."""
    entries = [{"logprob": -0.5}] * len(SAID)
    choice = {
        "token_ids": list(SAID),
        "logprobs": {"content": entries},
        "weight_versions": [{"version": "0", "start": 0, "end": len(SAID)}],
    }
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens_details": None}}).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                [length] = [int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:")]
                await reader.readexactly(length)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1 << 24)
        pipe.send(server.sockets[0].getsockname()[1])
        async with server:
            await server.serve_forever()

    asyncio.run(listen())


async def measure_http(port: int) -> list[float]:
    """Measure the seconds of CPU of a turn over HTTP, at each length of context."""
    weights = cast(Any, SimpleNamespace(model=torch.nn.Linear(1, 1), abandon=lambda: None))
    deadline = SyncDeadline(60.0, 0, "memory")
    replica = Replica(
        f"http://127.0.0.1:{port}", weights, capacity=64, backend="memory", deadline=deadline, on_lost=print
    )
    replica.up = True
    engine = OverHttp(replica)
    await measure_turn(HTTP_TURNS, engine, 100, AT_ONCE)
    prompts = [max(length - HTTP_TURNS * 127, 20) for length in CONTEXTS]
    found = [await measure_turn(HTTP_TURNS, engine, prompt, AT_ONCE) for prompt in prompts]
    await replica.close()
    return found


def main() -> None:
    console = Console()
    anyio.run(measure_turn, 20, Instant())
    table = Table("turns", "tokens", "ms of CPU a turn", "ratio", title="an engine that answers at once")
    first = 0.0
    for turns in TURNS:
        seconds = min(anyio.run(measure_turn, turns, Instant(), 20, max(1, 400 // turns)) for _ in range(5))
        first = first or seconds
        table.add_row(f"{turns}", f"{254 * turns:,}", f"{1000 * seconds:.3f}", f"{seconds / first:.2f}")
    console.print(table)
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    table = Table("tokens of context", "turns/s of CPU", "ratio", title="over HTTP")
    found = list(zip(*(anyio.run(measure_http, port) for port in [here.recv()] for _ in range(5)), strict=True))
    for length, of in zip(CONTEXTS, found, strict=True):
        table.add_row(f"{length:,}", f"{1 / min(of):,.0f}", f"{min(found[0]) / min(of):.2f}")
    console.print(table)
    server.terminate()


if __name__ == "__main__":
    main()
