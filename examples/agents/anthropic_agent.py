"""An agent on Anthropic's SDK, streaming.

agentrl train --env math-tools --agent "python examples/agents/anthropic_agent.py"
"""

import anthropic
from env_task import QUESTION, SYSTEM, TASK, call

client = anthropic.Anthropic()
functions = [tool["function"] for tool in TASK["tools"]]
tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
messages = [{"role": "user", "content": QUESTION}]
while True:
    with client.messages.stream(
        model="policy", max_tokens=500, system=SYSTEM, tools=tools, messages=messages
    ) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in message.content]})
    calls = [block for block in message.content if block.type == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": call(b.name, b.input)} for b in calls]
    messages.append({"role": "user", "content": results})
