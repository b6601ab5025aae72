"""The environment's tools by MCP, for agents that take tools so: the URL has the episode's key in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl.gateway.agent_episode import AgentEpisode
from agentrl.rollout.threads.forest import TurnRefused
from agentrl.types import ERROR_PREFIX

if TYPE_CHECKING:
    import mcp_types as types
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager

PATH = "/mcp"
Find = Callable[[str], AgentEpisode | None]


def build_mcp(find: Find) -> StreamableHTTPSessionManager | None:
    """Build the server of all episodes' tools; None where the package mcp is not installed.

    Args:
        find: an episode by its key.
    """
    try:
        from mcp.server import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    except ImportError:
        return None
    tools = _EpisodeTools(find)
    server: Server[Any] = Server("agentrl", on_list_tools=tools.list_tools, on_call_tool=tools.call_tool)
    return StreamableHTTPSessionManager(server, json_response=True, stateless=True)


def serve_mcp(manager: StreamableHTTPSessionManager) -> StreamableHTTPASGIApp:
    """Return the ASGI app of a server, which answers at a route's own path: not every client follows a redirection."""
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp

    return StreamableHTTPASGIApp(manager)


class _EpisodeTools:
    """The tools of the episode whose key is in a request's path."""

    def __init__(self, find: Find) -> None:
        self._find = find

    async def list_tools(self, context: Any, _: Any) -> types.ListToolsResult:
        import mcp_types as types

        functions = [tool["function"] for tool in self._find_episode(context).tools]
        return types.ListToolsResult(
            tools=[
                types.Tool(name=f["name"], description=f.get("description"), input_schema=f["parameters"])
                for f in functions
            ]
        )

    async def call_tool(self, context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        import mcp_types as types
        from mcp import MCPError

        try:
            text = await self._find_episode(context).call_tool(request.name, dict(request.arguments or {}))
        except TurnRefused as refusal:
            raise MCPError(types.INVALID_REQUEST, str(refusal)) from None
        return types.CallToolResult(content=[types.TextContent(text=text)], is_error=text.startswith(ERROR_PREFIX))

    def _find_episode(self, context: Any) -> AgentEpisode:
        from mcp import MCPError
        from mcp_types import INVALID_REQUEST

        episode = self._find(context.request.path_params["key"])
        if episode is None:
            raise MCPError(INVALID_REQUEST, "this URL is of no episode that runs")
        return episode
