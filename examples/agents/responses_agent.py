"""An agent on OpenAI's Responses; the conversation is held by the other side.

agentrl train --env math-tools --agent "python examples/agents/responses_agent.py"
"""

from typing import Any

from env_task import TASK, call
from openai import OpenAI

client = OpenAI()
tools: Any = [{"type": "function", **tool["function"]} for tool in TASK["tools"]]
items: Any = [{"role": m["role"], "content": m["content"]} for m in TASK["messages"]]
previous: Any = {}
while True:
    response = client.responses.create(model="policy", input=items, tools=tools, **previous)
    previous = {"previous_response_id": response.id}
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    items = [
        {"type": "function_call_output", "call_id": one.call_id, "output": call(one.name, one.arguments)}
        for one in calls
    ]
