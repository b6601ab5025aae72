"""Web pages as text, from hosts that are allowed and from no others."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import httpx2

from agentrl import ContractError, InfraError, Tool, ToolError, Toolset, __version__, tool
from agentrl.runtime.processes import WorkerDied, call_in_process
from agentrl_tools.html_text import html_to_text
from agentrl_tools.url_policy import PORTS, Rule, is_public, match_rule, parse_rule

TEXT = ("text/", "application/json", "application/xml", "application/javascript", "application/x-ndjson")
HEADERS = {
    "user-agent": f"agentrl/{__version__}",
    "accept": "text/html, text/*, */*;q=0.1",
    "accept-encoding": "identity",
}
REDIRECTS = 5
MAX_ADDRESSES = 4  # of a host that are tried
PARSE_S, PARSE_MEMORY = 5.0, 512 << 20


class Http(Toolset):
    """Fetches web pages as text, from what ``allow`` lists; each redirect is checked again.

    Private addresses are refused, whatever name leads there, but for a host and port spelt out in ``allow``.

    Args:
        allow: hosts, such as ``example.org`` or ``*.example.org:8080``, or beginnings of URLs.
        post: the model may send something too.
        links: the URLs of links are in the text, so that they can be followed.
        max_bytes: of a page; no more is read.
        timeout_s: of a call, redirects included.
        retries: after a time-out, a connection that failed, or a server's error.
        max_concurrency: calls at once; any number by default.
    """

    shared: httpx2.AsyncHTTPTransport

    def __init__(
        self,
        allow: Sequence[str],
        post: bool = False,
        links: bool = False,
        max_bytes: int = 500_000,
        timeout_s: float = 20.0,
        retries: int = 1,
        max_concurrency: int | None = None,
    ) -> None:
        if not allow or max_bytes < 1:
            raise ContractError(
                f"tool 'http' needs --tool.http.allow HOST,... and max_bytes of 1 or more; not {allow!r}, {max_bytes}"
            )
        self.allow = tuple(parse_rule(text) for text in allow)
        self.post_allowed, self.links, self.max_bytes = post, links, max_bytes
        self.timeout_s, self.retries, self.max_concurrency = timeout_s, retries, max_concurrency

    @asynccontextmanager
    async def open(self) -> AsyncIterator[httpx2.AsyncHTTPTransport]:
        # No client: that would keep cookies between episodes, and heed the proxies of this machine.
        async with httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None)) as transport:
            yield transport

    @property
    def tool_list(self) -> Sequence[Tool]:
        hosts = ", ".join(r.text for r in self.allow)
        marked = [t for t in super().tool_list if self.post_allowed or t.name != "post"]
        return [
            replace(
                t,
                description=f"{t.description} Allowed: {hosts}.",
                timeout_s=self.timeout_s,
                retries=self.retries,
                max_concurrency=self.max_concurrency,
            )
            for t in marked
        ]

    @tool
    async def fetch(self, url: str) -> str:
        """A web page, as text.

        Args:
            url: begins with http:// or https://.
        """
        return await self._fetch("GET", url)

    @tool
    async def post(self, url: str, body: str, content_type: str = "application/json") -> str:
        """Send something to a web server; its answer, as text.

        Args:
            url: begins with http:// or https://.
            body: what is sent.
            content_type: of what is sent.
        """
        return await self._fetch("POST", url, body.encode("utf-8", "replace"), {"content-type": content_type})

    async def _fetch(self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> str:
        for _ in range(REDIRECTS + 1):
            async with self._open_response(method, url, body, headers or {}) as (asked, response):
                location = response.headers.get("location")
                if not (300 <= response.status_code < 400 and location):
                    return await self._read(asked, response)
                try:
                    url = str(asked.join(location))
                except httpx2.InvalidURL:
                    raise ToolError(f"{asked} redirects to what is no URL: {location!r:.200}") from None
                if response.status_code in (301, 302, 303):
                    method, body, headers = "GET", b"", {}
        raise ToolError(f"more than {REDIRECTS} redirects, the last to {url}")

    @asynccontextmanager
    async def _open_response(
        self, method: str, text: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[httpx2.URL, httpx2.Response]]:
        """Open the response, its body unread. Raises ToolError: the URL is not allowed; InfraError: none came."""
        url, admitted = match_rule(self.allow, text)
        addresses = await _resolve_addresses(url, admitted)
        headers = {**HEADERS, **_check_ascii(headers), "host": url.netloc.decode("ascii")}
        try:
            response = await self._send(method, url, addresses, headers, body)
            try:
                yield url, response
            finally:
                await response.aclose()
        except (httpx2.LocalProtocolError, httpx2.UnsupportedProtocol) as error:
            raise ToolError(f"{url}: {error}") from None
        except httpx2.TransportError as error:
            raise InfraError("http_unreachable", f"{url}: {type(error).__name__}: {error}") from error

    async def _send(
        self, method: str, url: httpx2.URL, addresses: Sequence[str], headers: Mapping[str, str], body: bytes
    ) -> httpx2.Response:
        """Send the request to the first address that takes a connection."""
        name = {"sni_hostname": url.raw_host.decode("ascii")}  # whose certificate must be shown
        for address in addresses:
            request = httpx2.Request(
                method,
                url.copy_with(host=address),
                headers=headers,
                content=body if method == "POST" else None,
                extensions=name,
            )
            try:
                return await self.shared.handle_async_request(request)
            except httpx2.ConnectError:
                if address == addresses[-1]:
                    raise
        raise InfraError("http_unreachable", f"{url}: the name has no address")

    async def _read(self, url: httpx2.URL, response: httpx2.Response) -> str:
        status = f"HTTP {response.status_code} {response.reason_phrase}".strip()
        if response.status_code >= 500 or response.status_code == 429:
            raise InfraError("http_server", f"{url}: {status}")
        if response.status_code >= 400:
            raise ToolError(f"{url}: {status}")
        kind = response.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        if not (kind.startswith(TEXT) or kind.endswith(("+json", "+xml"))):
            raise ToolError(f"{url} is {kind}, which is not text")
        if (coding := response.headers.get("content-encoding", "identity").lower()) != "identity":
            raise ToolError(f"{url} comes compressed ({coding}) only, which is not read")
        content, cut = await self._read_bytes(response)
        text = _decode(content, response.charset_encoding)
        if kind in ("text/html", "application/xhtml+xml"):
            text = await _read_html(text, str(url) if self.links else None)
        return f"{text}\n[cut: the page is longer than {self.max_bytes} bytes]" if cut else text

    async def _read_bytes(self, response: httpx2.Response) -> tuple[bytes, bool]:
        """Read up to ``max_bytes``; the second value is True if there are more."""
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self.max_bytes:
                return bytes(content[: self.max_bytes]), True
        return bytes(content), False


async def _resolve_addresses(url: httpx2.URL, admitted: Rule) -> list[str]:
    """Look up the addresses to connect to. The checked ones are used: a name may mean others a moment later."""
    host, port = url.host.rstrip("."), PORTS[url.scheme] if url.port is None else url.port
    try:
        infos = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise InfraError("http_unreachable", f"{host}: {error}") from error
        raise ToolError(f"there is no host {host!r}") from None
    except UnicodeError:
        raise ToolError(f"there is no host {host!r}") from None
    addresses = list(dict.fromkeys(str(at[0]) for *_, at in infos))
    if not admitted.private and not all(is_public(a) for a in addresses):
        raise ToolError(f"{host!r} is in a private network, where nothing may be fetched")
    return addresses[:MAX_ADDRESSES]


async def _read_html(html: str, url: str | None) -> str:
    """Return a page's text, read in a worker process: the parser may take the square of the page's length.

    Raises:
        ToolError: it takes too long, or too much memory.
    """
    try:
        return await call_in_process(
            html_to_text, html, url, timeout_s=PARSE_S, cpu_s=PARSE_S, memory_bytes=PARSE_MEMORY, reads_others=True
        )
    except (TimeoutError, WorkerDied, MemoryError, RecursionError):
        raise ToolError("the page's HTML cannot be read: it takes too long, or too much memory") from None


def _check_ascii(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not value.isascii() or not value.isprintable():
            raise ToolError(f"{name} may hold plain ASCII only, not {value!r:.100}")
    return dict(headers)


def _decode(content: bytes, charset: str | None) -> str:
    try:
        return content.decode(charset or "utf-8", "replace")
    except LookupError:  # a charset nobody knows
        return content.decode("utf-8", "replace")
