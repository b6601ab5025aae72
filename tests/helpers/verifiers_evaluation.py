"""verifiers' own evaluation of given turns: a program for a package's venv, which imports nothing of agentrl.

It starts verifiers' own EnvServer, and asks it by verifiers' own EnvClient to play each task against an endpoint that
says the given turns. JSON on stdin has ``taskset``, ``config``, ``harnesses`` (a folder) and ``episodes``: a task's
number and its turns, as OpenAI's messages. Rewards and metrics are JSON on stdout.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config


async def evaluate(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Evaluate the turns of each episode."""
    sys.path.insert(0, asked["harnesses"])
    seat = {"harness": {"id": "agentrl_chat"}, "runtime": {"type": "subprocess"}}
    config = resolve_env_config({"taskset": {"id": asked["taskset"], **asked["config"]}, "agent": seat})
    tasks = list(load_taskset(config.taskset))
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    await client.wait_for_server_startup(timeout=60)
    done = []
    for episode in asked["episodes"]:
        runner, url = await serve_turns(episode["turns"])
        played = await client.run(
            client=EvalClientConfig(base_url=url, api_key_var="NONE"),
            model="policy",
            sampling=SamplingConfig(),
            task_data=tasks[episode["task"]].data.model_dump(mode="json"),
        )
        (trace,) = played.traces
        rewards = {name: reward.score for name, reward in trace.rewards.items()}
        done.append({"rewards": rewards, "reward": trace.reward, "metrics": trace.metrics})
        await runner.cleanup()
    await client.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return done


async def serve_turns(turns: list[dict[str, Any]]) -> tuple[web.AppRunner, str]:
    """Serve the policy that says these turns."""

    async def complete(request: web.Request) -> web.Response:
        said = sum(m["role"] == "assistant" for m in (await request.json())["messages"])
        finish = "tool_calls" if turns[said].get("tool_calls") else "stop"
        choice = {"index": 0, "message": {"role": "assistant", **turns[said]}, "finish_reason": finish}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "usage": usage}
        return web.json_response({**head, "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


if __name__ == "__main__":
    print("\n" + json.dumps(asyncio.run(evaluate(json.load(sys.stdin)))))
