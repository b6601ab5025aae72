"""An MCP server that a page names."""

from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@server.tool()
def search(query: str) -> str:
    """Search."""
    return f"nothing about {query}"


if __name__ == "__main__":
    server.run()
