"""The tool ``spawn``: the model gives a task to a sub-agent, which is the same policy in a conversation of its own.

An episode plays the sub-agent (`agentrl.rollout.sub_agents`), whose turns are trained with it.
"""

from __future__ import annotations

from agentrl.errors import ToolError
from agentrl.tools.tool import Tool, tool


@tool
async def spawn(task: str) -> str:
    """Give a task to a sub-agent, which has your tools and has not seen this conversation. Returns its answer.

    Args:
        task: all that it has to know.
    """
    raise ToolError("there is no sub-agent here: an episode that agentrl plays has them")


def is_spawn(offered: Tool) -> bool:
    """Return True for this tool."""
    return offered.function is spawn.function
