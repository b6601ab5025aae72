"""What the gateway costs: python benchmarks/gateway.py [--episodes N]

A scripted engine, and an agent on a bare socket in another process, so that neither a model nor an SDK is in the
numbers: 256 episodes at once, of 8 turns, each of which calls a tool of the agent's own but the last. For each
dialect the CPU time of the gateway's process over the calls, of which

  engine    what the scripted engine takes, called alone, as many at once
  episode   what the same turns take where the environment plays them itself: rendering, reading, scoring
  gateway   the rest: HTTP, JSON, finding what a request goes on from

The same of a sixteenth as many episodes of 64 turns: what the gateway takes may not grow with the history.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median
from time import process_time
from typing import Any
from urllib.parse import urlsplit

import anyio

from agentrl import EnvSpec, ToolEnv, Trajectory, tool
from agentrl.agents.forms import parse_agent
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.runtime.memory import collect_garbage_seldom
from agentrl.testing import STOP, ByteRenderer, call
from agentrl.types import Completion, Observation, SamplingParams

GROUP, LATENCY_S = 8, 0.05
ROW = "{:16}{:>8}{:>6}{:>8}{:>8}{:>8}{:>9}"
TEXT = "Here is what was found, in about as many words as tools use. " * 4  # 250 characters a turn
THOUGHT = "I look at the next place, as the one before did not have it. "


class Looking(ToolEnv):
    """Offers a tool, and scores the turns."""

    max_turns = 1000

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return "Look around. " + TEXT, {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"turns": float(trajectory.turns)}

    @tool(max_consecutive_failures=None)
    async def look(self, place: str) -> str:
        """Look at a place."""
        return TEXT


class Engine:
    """Calls a tool until the last turn, after a short wait."""

    capacity, max_context, version = 1 << 30, 1 << 30, 0

    def __init__(self, turns: int) -> None:
        self.turns, self.done = turns, dict[str, int]()
        self.said = [self._complete(THOUGHT + call("look", place="somewhere")), self._complete("done")]

    def _complete(self, text: str) -> Completion:
        ids = (*text.encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        turn = self.done[session] = self.done.get(session, 0) + 1
        await anyio.sleep(LATENCY_S)
        return self.said[turn >= self.turns]

    def end_session(self, session: str) -> None:
        self.done.pop(session, None)

    async def update_weights(self, policy: Any, version: int) -> None: ...

    async def close(self) -> None: ...


# -- the agent, in its own process -------------------------------------------------------------------------------------


class Connection:
    """A kept-alive connection, on which JSON is posted."""

    def __init__(self, task: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.task, self.reader, self.writer = task, reader, writer

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.task.api_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200"), answer
        return await self.reader.readexactly(int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0]))


@asynccontextmanager
async def connected(task: Any) -> AsyncIterator[Connection]:
    where = urlsplit(task.base_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 24)
    try:
        yield Connection(task, reader, writer)
    finally:
        writer.close()


async def chat(task: Any) -> None:
    messages = list(task.messages)
    async with connected(task) as http:
        while True:
            body = {"model": "m", "messages": messages, "tools": task.tools}
            message = json.loads(await http.post("/v1/chat/completions", body))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": TEXT} for c in message["tool_calls"]]


async def chat_streaming(task: Any) -> None:
    messages = list(task.messages)
    async with connected(task) as http:
        while True:
            body = {"model": "m", "messages": messages, "tools": task.tools, "stream": True}
            lines = (await http.post("/v1/chat/completions", body)).split(b"\n\n")  # of events
            deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-2]]
            calls = [c for d in deltas for c in d.get("tool_calls", ())]
            messages.append({"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas)})
            if not calls:
                return
            messages[-1]["tool_calls"] = calls
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": TEXT} for c in calls]


async def chat_with_tools(task: Any) -> None:
    messages = list(task.messages)
    async with connected(task) as http:
        while True:
            body = {"model": "m", "messages": messages, "tools": task.tools}
            message = json.loads(await http.post("/v1/chat/completions", body))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return
            for one in message["tool_calls"]:
                answer = json.loads(await http.post("/v1/agentrl/call", one["function"]))
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": answer["content"]})


async def responses(task: Any) -> None:
    items = list(task.messages)
    tools = [{"type": "function", **t["function"]} for t in task.tools]
    async with connected(task) as http:
        while True:
            answer = json.loads(await http.post("/v1/responses", {"model": "m", "input": items, "tools": tools}))
            items += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            if not calls:
                return
            items += [{"type": "function_call_output", "call_id": c["call_id"], "output": TEXT} for c in calls]


async def messages(task: Any) -> None:
    said = list(task.messages)
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in task.tools]
    async with connected(task) as http:
        while True:
            answer = json.loads(await http.post("/v1/messages", {"model": "m", "messages": said, "tools": tools}))
            said.append({"role": "assistant", "content": answer["content"]})
            calls = [b for b in answer["content"] if b["type"] == "tool_use"]
            if not calls:
                return
            results = [{"type": "tool_result", "tool_use_id": c["id"], "content": TEXT} for c in calls]
            said.append({"role": "user", "content": results})


# -- what is measured --------------------------------------------------------------------------------------------------


async def cost_of(play: Rollout, episodes: int, turns: int) -> float:
    """Play episodes at once; return the process's milliseconds of CPU a turn."""
    gc.collect()
    cpu = process_time()
    groups = await play.batch(range(episodes // GROUP), GROUP)
    cpu = process_time() - cpu
    assert all(t.fault is None and t.turns == turns for g in groups for t in g), groups[0][0].fault
    return 1000 * cpu / (episodes * turns)


async def cost_of_engine(episodes: int, turns: int) -> float:
    engine = Engine(turns)

    async def generate(session: str) -> None:
        for _ in range(turns):
            await engine.generate((), SamplingParams(), session=session)

    cpu = process_time()
    async with anyio.create_task_group() as tasks:
        for number in range(episodes):
            tasks.start_soon(generate, str(number))
    return 1000 * (process_time() - cpu) / (episodes * turns)


async def cost_of_dialect(solve: str, episodes: int, turns: int) -> float:
    spec, agent = EnvSpec(Looking), parse_agent(f"{__file__}:{solve}", 1)
    async with spec.open(), Gateway(agent, say=lambda _: None).open() as gateway:
        play = Rollout(spec, Engine(turns), ByteRenderer(), EpisodeLimits(turn_timeout_s=600))
        play.begin = gateway.begin
        await cost_of(play, GROUP * 8, turns)  # warm
        return median([await cost_of(play, episodes, turns) for _ in range(1 if turns > 8 else 3)])


async def measure(most: int) -> None:
    columns = ("dialect", "at once", "turns", "all", "engine", "episode", "gateway")
    print("milliseconds of CPU of the gateway's process, a turn", ROW.format(*columns), sep="\n", flush=True)
    for episodes, turns in ((most, 8), (most // 16, 64)):
        engine = await cost_of_engine(episodes, turns)
        own = Rollout(EnvSpec(Looking), Engine(turns), ByteRenderer())
        await cost_of(own, GROUP * 8, turns)
        native = median([await cost_of(own, episodes, turns) for _ in range(1 if turns > 8 else 3)]) - engine
        for solve in ("chat", "chat_streaming", "responses", "messages", "chat_with_tools"):
            every = await cost_of_dialect(solve, episodes, turns)
            figures = every, engine, native, every - engine - native
            row = solve.replace("_", " "), episodes, turns, *(f"{figure:.2f}" for figure in figures)
            print(ROW.format(*row), flush=True)
    print(f"{os.cpu_count()} cores; chat with tools: two calls a turn, of which one is of the environment")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256, help="at once")
    episodes = parser.parse_args().episodes
    with collect_garbage_seldom():  # as in a run
        anyio.run(measure, episodes)


if __name__ == "__main__":
    main()
