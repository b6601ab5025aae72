"""An agent in LangGraph, streaming.

agentrl train --env math-tools --agent "python examples/agents/langgraph_agent.py"
"""

from env_task import QUESTION, SYSTEM, call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression."""
    return call("calculator", {"expression": expression})


agent = create_react_agent(ChatOpenAI(model="policy", streaming=True), [calculator], prompt=SYSTEM)
for _ in agent.stream({"messages": [("user", QUESTION)]}, {"recursion_limit": 10}):
    pass
