"""The rules for URLs that may be fetched, and for addresses that may be connected to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import httpx2

from agentrl.errors import ContractError, ToolError

PORTS = {"http": 80, "https": 443}
# The Python at hand may not know all that the registries of special addresses say, and calls some of it global.
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
        *("192.175.48.0/24", "198.18.0.0/15", "168.63.129.16/32"),  # the last: a cloud's own, at a public address
        *("64:ff9b:1::/48", "100:0:0:1::/64", "2001::/23", "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fec0::/10"),
    )
)
_GLOBAL6 = ipaddress.ip_network("2000::/3")  # all that is given out
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class Rule:
    """``example.org``, ``*.example.org:8080`` or ``https://example.org/docs/``.

    A host means its standard ports, a URL all that begins with it. Only a host and port spelt out may be private.
    """

    text: str
    host: str
    port: int | None = None
    scheme: str | None = None
    path: str = "/"

    @property
    def private(self) -> bool:
        return self.port is not None and "*" not in self.host

    def admits(self, url: httpx2.URL) -> bool:
        port = PORTS[url.scheme] if url.port is None else url.port
        return (
            self._is_host(url.host.lower().rstrip("."))
            and (self.scheme is None or self.scheme == url.scheme)
            and port == (self.port or PORTS[self.scheme or url.scheme])
            and url.path.startswith(self.path)
        )

    def _is_host(self, host: str) -> bool:
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return self.host in ("*", host)


def parse_rule(text: str) -> Rule:
    """Parse a rule. Raises ContractError for what is neither a host nor a URL."""
    wrong = ContractError(
        f"tool.http.allow: {text!r} is no host, such as example.org or *.example.org:8080, and no URL's beginning"
    )
    try:
        url = httpx2.URL(text if "://" in text else f"http://{text}")
        explicit = url.port if url.port is not None else _read_standard_port(text)
    except (httpx2.InvalidURL, ValueError):
        raise wrong from None
    host = url.host.lower()
    if not host or url.scheme not in PORTS or url.query or url.userinfo:
        raise wrong
    if "%" in host or (host != "*" and "*" in host.removeprefix("*.")):
        raise wrong
    if "://" in text:
        return Rule(text, host, explicit, url.scheme, url.path or "/")
    if url.path not in ("", "/"):
        raise wrong
    return Rule(text, host, explicit)


def _read_standard_port(text: str) -> int | None:
    """Return a standard port that is spelt out: `httpx2.URL` leaves it out."""
    authority = text.partition("://")[2] or text
    after = authority.partition("/")[0].rpartition("]")[2].rpartition(":")
    return int(after[2]) if after[1] and after[2] else None


def match_rule(rules: Sequence[Rule], text: str) -> tuple[httpx2.URL, Rule]:
    """Return the URL, and the rule that admits it. Raises ToolError, in words for the model, if none does."""
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise ToolError(f"not a URL: {text!r:.200} ({error})") from None
    if url.scheme not in PORTS or not url.host:
        raise ToolError(f"not a URL that begins with http:// or https:// and a host: {text!r:.200}")
    if url.userinfo:
        raise ToolError("a URL with a user name or password is not fetched")
    if {"..", "."} & set(unquote(unquote(url.path)).replace("\\", "/").split("/")):
        raise ToolError("a URL whose path has . or .. in it is not fetched; write the path it means")
    admitting = [r for r in rules if r.admits(url)]
    if not admitting:
        raise ToolError(f"{url.host!r} is not among what may be fetched: {', '.join(r.text for r in rules)}"[:1000])
    return url, next((r for r in admitting if r.private), admitting[0])


def is_public(address: str) -> bool:
    """Return True if an IP address belongs to the internet, and to no part of it that is this host or its network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if (inner := _find_inner(ip)) is not None:
            return is_public(str(inner))
        if ip not in _GLOBAL6:
            return False
    special = any(ip in network for network in _SPECIAL if network.version == ip.version)
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not special


def _find_inner(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address stands for, if it does: mapped, 6to4, or through a NAT64."""
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour
