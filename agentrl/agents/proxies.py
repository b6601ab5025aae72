"""Proxies of the machine's environment, which are none for the endpoint on its loopback."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

_LOOPBACK = ("127.0.0.1", "localhost")


def exempt_loopback() -> dict[str, str]:
    """Return the variables by which an agent's clients ask no proxy for the endpoint, beside those that are set."""
    own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    hosts = own if own.strip() == "*" else ",".join([*([own] if own else []), *_LOOPBACK])
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def is_loopback(url: str) -> bool:
    """Return True for a URL on the loopback of this machine."""
    return urlsplit(url).hostname in (*_LOOPBACK, "::1")
