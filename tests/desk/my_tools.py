"""A tool that a page names."""

from agentrl import tool


@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: what for.
    """
    return f"nothing about {query}"
