"""Addresses of servers, whose parts are looked at once, where a user gives them."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def split_address(url: str) -> SplitResult:
    """Split a server's address; its host and its port can be read then.

    Raises:
        ValueError: it is none; the text is what is wrong with it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("it begins with neither http:// nor https://")
    if not parts.hostname:
        raise ValueError("it names no host")
    parts.hostname.encode("idna")  # as it is looked up
    if parts.port == 0:
        raise ValueError("nobody listens at port 0")
    return parts
