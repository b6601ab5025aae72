"""An agent on OpenAI's SDK, as one writes it for any model; nothing of agentrl is imported.

agentrl train --env math-tools --agent examples/openai_agent.py:solve
"""

from typing import Any

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # to make one takes longer than a turn


async def solve(task: Any) -> str | None:
    client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=task.tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            function = call.function  # type: ignore[union-attr]
            content = await task.call(function.name, function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
