"""An agent in OpenAI's Agents SDK, streaming.

agentrl train --env math-tools --agent "python examples/agents/openai_agents_agent.py"
"""

import asyncio

from agents import Agent, Runner, function_tool, set_tracing_disabled
from env_task import QUESTION, SYSTEM, call

set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression."""
    return call("calculator", {"expression": expression})


async def solve() -> None:
    agent = Agent(name="math", instructions=SYSTEM, tools=[calculator], model="policy")
    async for _ in Runner.run_streamed(agent, QUESTION, max_turns=5).stream_events():
        pass


asyncio.run(solve())
