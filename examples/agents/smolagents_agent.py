"""An agent in smolagents, streaming. It writes its history anew at each step, so that each of its turns is a thread.

agentrl train --env math-tools --model MODEL --agent "python examples/agents/smolagents_agent.py"
"""

import os

from env_task import QUESTION, call
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Compute.

    Args:
        expression: of arithmetic
    """
    return call("calculator", {"expression": expression})


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
ToolCallingAgent([calculator], model, max_steps=3, stream_outputs=True).run(QUESTION)
