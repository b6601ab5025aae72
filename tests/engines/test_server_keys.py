"""The keys of vLLM servers: who may find them, and what a server does without."""

import os
import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl.engines import server_keys
from agentrl.engines.openai_endpoint import EndpointEngine
from agentrl.engines.vllm.server_door import ServerDoor

URL = "http://127.0.0.1:8123"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def shown(url: str) -> str | None:
    request = httpx2.Request("GET", url)
    next(server_keys.ServerAuth(url).auth_flow(request))
    return request.headers.get("authorization")


def test_a_key_is_in_a_file_that_only_its_user_reads() -> None:
    key = server_keys.create_server_key(8123)
    path = server_keys.find_key_file(8123)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (path.read_text(), len(key) > 40) == (key, True)
    assert (server_keys.find_server_key(URL), shown(f"{URL}/pause")) == (key, f"Bearer {key}")
    for of_none in ("http://127.0.0.1:8124", "http://127.0.0.1:99999", "http://127.0.0.1:$PORT", "http://[::1"):
        assert server_keys.find_server_key(of_none) is None


def test_a_server_that_starts_again_has_another_key_and_the_last_one_takes_its_file() -> None:
    before = server_keys.create_server_key(8123)
    after = server_keys.create_server_key(8123)
    assert (before != after, server_keys.find_server_key(URL)) == (True, after)
    server_keys.remove_server_key(8123, before)
    assert server_keys.find_server_key(URL) == after
    server_keys.remove_server_key(8123, after)
    assert server_keys.find_server_key(URL) is None


def test_a_key_in_a_file_of_somebody_else_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    server_keys.create_server_key(8123)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert server_keys.find_server_key(URL) is None


def test_a_key_of_ones_own_is_sent_to_servers_and_not_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    assert server_keys.create_server_key(8123) == "mine"
    assert not server_keys.find_key_file(8123).exists()
    assert (shown(URL), shown("http://gpu7:8000")) == ("Bearer mine", "Bearer mine")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert "authorization" in EndpointEngine(f"{URL}/v1")._client.headers
    assert "authorization" not in EndpointEngine("https://example.org/v1")._client.headers


async def test_the_door_is_closed_on_every_path_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def server(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        ServerDoor(server)
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    transport = httpx2.ASGITransport(app=ServerDoor(server))
    async with httpx2.AsyncClient(transport=transport, base_url=URL) as client:
        for path in ("/v1/models", "/pause", "/update_weights", "/collective_rpc", "/metrics", "/", "//health"):
            assert (await client.post(path)).status_code == 403, path
            assert (await client.post(path, auth=server_keys.ServerAuth(URL))).status_code == 200, path
            both = {"Authorization": "Bearer mine", "Origin": URL}
            assert (await client.post(path, headers=both)).status_code == 403, path
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("refusal", [401, 403])
def test_a_key_that_is_refused_is_looked_up_again_once(refusal: int) -> None:
    first = server_keys.create_server_key(8123)
    auth = server_keys.ServerAuth(URL)

    def ask(right: str) -> list[str]:
        shown, request = [], httpx2.Request("GET", URL)
        flow = auth.auth_flow(request)
        next(flow)
        while True:
            shown.append(request.headers["authorization"].removeprefix("Bearer "))
            try:
                flow.send(httpx2.Response(200 if shown[-1] == right else refusal))
            except StopIteration:
                return shown

    assert ask(first) == [first]
    server_keys.remove_server_key(8123, first)
    second = server_keys.create_server_key(8123)  # a server that was started again
    assert ask(second) == [first, second]
    assert ask(second) == [second]
    assert ask("another's") == [second], "the same one is not shown twice"


async def test_a_server_that_starts_again_at_its_port_takes_who_knew_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def server(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def start() -> httpx2.AsyncClient:
        monkeypatch.setenv("VLLM_API_KEY", server_keys.create_server_key(8123))
        door = ServerDoor(server)
        monkeypatch.delenv("VLLM_API_KEY")
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=door), base_url=URL, auth=auth)

    auth = server_keys.ServerAuth(URL)
    for _ in range(3):
        async with start() as client:
            assert (await client.get("/weight_info")).status_code == 200
            assert (await client.post("/pause", json={})).status_code == 200
