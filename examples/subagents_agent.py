"""An agent of several contexts on OpenAI's SDK: a helper checks the answer, a long history is folded.

agentrl train --env math-tools --agent examples/subagents_agent.py:solve
agentrl view runs/last
"""

from typing import Any

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # to make one takes longer than a turn
MOST_MESSAGES = 3  # of a history, behind the task; a longer one is folded


class Chat:
    """One conversation with the policy."""

    def __init__(self, task: Any, messages: list[Any]) -> None:
        self.task, self.messages = task, messages
        self.client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)

    async def ask(self, *, tools: bool = True) -> Any:
        """Sample a turn, and run its calls."""
        offered = {"tools": self.task.tools} if tools else {}
        answer = await self.client.chat.completions.create(model="policy", messages=self.messages, **offered)
        message: Any = answer.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            content = await self.task.call(call.function.name, call.function.arguments)
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return message


async def solve(task: Any) -> str:
    question = task.messages[-1]["content"]
    main = Chat(task, list(task.messages))
    answer = await play(main)
    await Chat(task, [{"role": "user", "content": f"A title: {answer}"}]).ask(tools=False)  # for a screen, say
    other = await play(Chat(task, [{"role": "user", "content": f"Check this: {question}"}]))
    main.messages.append({"role": "user", "content": f"Another answer is: {other} Which one is right?"})
    return await play(main)


async def play(chat: Chat) -> str:
    """Let the policy answer; fold a history that gets long: the same task, and what is known."""
    task = chat.task.messages
    while (said := await chat.ask()).tool_calls:
        told = chat.messages[len(task) :]
        if len(told) > MOST_MESSAGES:
            known = "; ".join(m["content"] for m in told if m["role"] == "tool")
            chat.messages = [*chat.messages[: len(task)], {"role": "user", "content": f"Known so far: {known}"}]
    return str(said.content)
