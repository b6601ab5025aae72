"""The http tool: what it reads, what it refuses, and that a redirect or a name leads nowhere else. Real HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest
from agentrl_tools import http
from agentrl_tools.http import Http
from agentrl_tools.url_policy import is_public, match_rule, parse_rule

from agentrl import ContractError, InfraError, Tool, ToolError
from agentrl.runtime.loop_watchdog import watch_event_loop
from agentrl.tools.toolset import load_tool


class Site(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, str, bytes]] = []
        self.sent = 0
        self.bomb = ""

    @property
    def at(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked.append((self.command, self.path, self.headers["host"], body))
        self.route(self.path.partition("?")[0].strip("/") or "page", self.path.partition("?")[2])

    do_POST = do_GET  # noqa: N815

    def route(self, name: str, query: str) -> None:
        match name:
            case "page":
                self.answer("<title>Hi</title><p>one<br>two<script>bad()</script>", "text/html; charset=utf-8")
            case "latin":
                self.answer("café".encode("latin-1"), "text/plain; charset=latin-1")
            case "json":
                self.answer('{"a": 1}', "application/json")
            case "image":
                self.answer(b"\x89PNG", "image/png")
            case "gzip":
                self.answer(b"\x1f\x8b", "text/plain", {"content-encoding": "gzip"})
            case "status":
                self.answer("words", "text/plain", status=int(query))
            case "to":
                self.answer("", "text/plain", {"location": query}, 302)
            case "keep":
                self.answer("", "text/plain", {"location": "/echo"}, 307)
            case "loop":
                self.answer("", "text/plain", {"location": "/loop"}, 302)
            case "cookie":
                self.answer(str(self.headers["cookie"]), "text/plain", {"set-cookie": "a=1"})
            case "slow":
                time.sleep(1)
                self.answer("late", "text/plain")
            case "bomb":
                self.answer(self.server.bomb, "text/html")
            case "endless":
                self.endless()
            case "broken":
                self.send_response(200)
                self.send_header("content-length", "100")
                self.end_headers()
            case _:
                self.answer(self.server.asked[-1][3] or self.path, "text/plain")

    def answer(self, body: str | bytes, kind: str, headers: dict[str, str] | None = None, status: int = 200) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def endless(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.end_headers()
        try:
            while self.server.sent < 50_000_000:
                self.server.sent += self.wfile.write(b"x" * 10_000)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@asynccontextmanager
async def using(*allow: str, **settings: Any) -> AsyncIterator[dict[str, Tool]]:
    toolset = Http(list(allow), **{"retries": 0, **settings})
    async with toolset.open() as shared:
        yield {t.name: t for t in toolset.start_episode(shared).tool_list}


async def refused(tool: Tool, url: str, **arguments: str) -> str:
    with pytest.raises(ToolError) as raised:
        await tool(url=url, **arguments)
    return str(raised.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/page", "Hi\n\none\ntwo"),
        ("/latin", "café"),
        ("/json", '{"a": 1}'),
        ("/to?/echo", "/echo"),
        ("/echo?q=1#part", "/echo?q=1"),
    ],
)
async def test_pages_are_text(site: Site, path: str, said: str) -> None:
    async with using(site.at) as tools:
        assert await tools["fetch"](url=f"http://{site.at}{path}") == said
    assert site.asked[0][2] == site.at


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/image", "is image/png, which is not text"),
        ("/gzip", r"comes compressed \(gzip\) only"),
        ("/status?404", "HTTP 404"),
        ("/loop", "more than 5 redirects"),
        ("/to?http://a:b/", "redirects to what is no URL"),
        ("/to?http://example.org/", "'example.org' is not among what may be fetched: 127.0.0.1"),
        ("/to?file:///etc/passwd", "not a URL that begins with http:// or https://"),
    ],
)
async def test_what_is_no_page_is_told_to_the_model(site: Site, path: str, words: str) -> None:
    async with using(site.at) as tools:
        with pytest.raises(ToolError, match=words):
            await tools["fetch"](url=f"http://{site.at}{path}")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/status?500", "http_server"),
        ("/status?429", "http_server"),
        ("/broken", "http_unreachable"),
        ("/slow", "tool_timeout"),
    ],
)
async def test_a_failing_server_is_the_world_s_fault_and_asked_again(site: Site, path: str, kind: str) -> None:
    async with using(site.at, retries=1, timeout_s=0.3) as tools:
        with pytest.raises(InfraError) as fault:
            await tools["fetch"](url=f"http://{site.at}{path}")
    assert fault.value.kind == kind
    assert len(site.asked) == 2


async def test_a_server_that_is_not_there_is_the_world_s_fault() -> None:
    async with using("127.0.0.1:9") as tools:
        with pytest.raises(InfraError, match=r"http://127\.0\.0\.1:9/: ConnectError"):
            await tools["fetch"](url="http://127.0.0.1:9/")


async def test_no_more_is_read_than_allowed(site: Site) -> None:
    async with using(site.at, max_bytes=1000) as tools:
        said = await tools["fetch"](url=f"http://{site.at}/endless")
    assert said == "x" * 1000 + "\n[cut: the page is longer than 1000 bytes]"
    assert site.sent < 20_000_000  # what the sockets buffer, not all


async def test_post_must_be_allowed(site: Site) -> None:
    async with using(site.at) as tools:
        assert list(tools) == ["fetch"]
    async with using(site.at, post=True) as tools:
        assert await tools["post"](url=f"http://{site.at}/echo", body="héllo") == "héllo"
        assert await tools["post"](url=f"http://{site.at}/keep", body="again") == "again"
        assert await tools["post"](url=f"http://{site.at}/to?/echo", body="dropped") == "/echo"
        assert "plain ASCII only" in await refused(
            tools["post"], f"http://{site.at}/", body="", content_type="x\r\nhost: y"
        )
    assert [a[0] for a in site.asked] == ["POST", "POST", "POST", "POST", "GET"]


async def test_links_are_kept_where_wanted(site: Site) -> None:
    async with using(site.at, links=True) as tools:
        assert "Allowed: 127.0.0.1:" in tools["fetch"].description
        assert tools["fetch"].parameters["required"] == ["url"]


async def test_nothing_is_remembered_between_calls(site: Site) -> None:
    async with using(site.at) as tools:
        for _ in range(2):
            assert await tools["fetch"](url=f"http://{site.at}/cookie") == "None"


Names = dict[str, list[list[str]]]  # a name to the addresses it means, look-up by look-up


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Names:
    real: Callable[..., Any] = socket.getaddrinfo
    names: Names = {}

    def found(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in names:
            return real(host, port, *rest, **more)
        addresses = names[name].pop(0)
        return [a for at in addresses for a in real(at, port, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return names


async def test_a_name_that_leads_into_a_private_network_is_refused(site: Site, dns: Names) -> None:
    port = site.server_address[1]
    for address in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fe80::1"):
        dns["inner.test"] = [[address]]
        async with using(f"*.test:{port}", "*") as tools:
            words = await refused(tools["fetch"], f"http://inner.test:{port}/")
        assert words == "'inner.test' is in a private network, where nothing may be fetched"
    dns["mixed.test"] = [["8.8.8.8", "127.0.0.1"]]
    async with using("mixed.test") as tools:
        assert "private network" in await refused(tools["fetch"], "http://mixed.test/")
    assert site.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "[::1]", "localhost"])
async def test_addresses_of_this_host_are_refused_however_they_are_written(host: str) -> None:
    async with using("*") as tools:
        assert "private network" in await refused(tools["fetch"], f"http://{host}/")


async def test_what_was_checked_is_what_is_connected_to(site: Site, dns: Names) -> None:
    port = site.server_address[1]
    dns["twice.test"] = [["127.0.0.1"], ["127.0.0.9"]]  # a second look-up would fail to connect
    async with using(f"twice.test:{port}") as tools:
        assert await tools["fetch"](url=f"http://twice.test:{port}/echo") == "/echo"
    assert site.asked[0][2] == f"twice.test:{port}"
    assert dns["twice.test"] == [["127.0.0.9"]]


@pytest.mark.parametrize("bomb", ["<!--", "<a ", "<!", "<a b='"])
async def test_a_page_that_is_hard_to_read_holds_up_nobody(
    bomb: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PARSE_S", 1.0)
    told: list[str] = []
    words: list[str] = []
    site.bomb = bomb * 25_000
    async with using(site.at) as tools:
        with watch_event_loop(told.append, 0.5, whose=("/",)):
            try:
                await tools["fetch"](url=f"http://{site.at}/bomb")  # of some bombs newer versions of Python make little
            except ToolError as refusal:
                words.append(str(refusal))
            await anyio.sleep(0.3)
    assert words in ([], ["the page's HTML cannot be read: it takes too long, or too much memory"])
    assert told == []


async def test_a_second_address_is_tried(site: Site, dns: Names) -> None:
    port = site.server_address[1]
    dns["two.test"] = [["127.0.0.9", "127.0.0.1"]]
    async with using(f"two.test:{port}") as tools:
        assert await tools["fetch"](url=f"http://two.test:{port}/echo") == "/echo"


@pytest.mark.parametrize(
    ("allow", "url", "admitted"),
    [
        ("example.org", "https://example.org/a", True),
        ("example.org", "http://EXAMPLE.org./", True),
        ("example.org", "http://example.org:8080/", False),
        ("example.org", "http://www.example.org/", False),
        ("example.org", "http://example.org.evil.net/", False),
        ("example.org", "http://evil.net/example.org", False),
        ("*.example.org", "http://a.b.example.org/", True),
        ("*.example.org", "http://example.org/", False),
        ("*.example.org", "http://notexample.org/", False),
        ("*.example.org:8080", "https://a.example.org:8080/", True),
        ("https://example.org/docs/", "https://example.org/docs/a", True),
        ("https://example.org/docs/", "http://example.org/docs/a", False),
        ("https://example.org/docs/", "https://example.org/other", False),
        ("https://example.org/docs/", "https://example.org/docs/../other", False),
        ("https://example.org/docs/", "https://example.org/docs/%2e%2e/other", False),
        ("https://example.org/docs/", "https://example.org/docs/%252e%252e%252fother", False),
        ("example.org", "https://user:word@example.org/", False),
        ("example.org", "https://example.org@evil.net/", False),
        ("example.org", "ftp://example.org/", False),
        ("example.org", "example.org", False),
        ("example.org", "http://[broken", False),
        ("[::1]:80", "http://[::1]/", True),
    ],
)
def test_what_is_allowed(allow: str, url: str, admitted: bool) -> None:
    if admitted:
        match_rule([parse_rule(allow)], url)
        return
    with pytest.raises(ToolError):
        match_rule([parse_rule(allow)], url)


@pytest.mark.parametrize(
    "text", ["", "ex ample", "example.org/docs", "a.*.org", "ftp://example.org", "http://", "*x.org"]
)
def test_what_is_no_host_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ContractError, match=r"is no host, such as example\.org"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::", False),
        ("fd00::1", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", True),
        ("64:ff9b:1::808:808", False),
        ("fec0::1", False),
        ("192.0.0.8", False),
        ("192.0.0.9", False),
        ("192.88.99.1", False),
        ("168.63.129.16", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2001::1", False),
        ("3fff::1", False),
        ("5f00::1", False),
        ("4000::1", False),
        ("2a00:1450:4001::1", True),
        ("2002:7f00:1::", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_without_hosts_it_is_refused() -> None:
    with pytest.raises(ContractError, match=r"needs a value for --tool.http.allow"):
        load_tool("agentrl_tools.http:Http", {})
    with pytest.raises(ContractError, match=r"needs --tool.http.allow HOST"):
        Http([])
    found = load_tool("agentrl_tools.http:Http", {"allow": "a.org, *.b.org:81"})
    assert isinstance(found, Http)
    assert [r.text for r in found.allow] == ["a.org", "*.b.org:81"]
