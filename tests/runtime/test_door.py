"""A door before a server: who shows the token comes in, web pages of others do not."""

from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.runtime.door import Door, choose_token


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


async def knock(door: Door, path: str = "/", query: str = "", kind: str = "http", **headers: str) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    named = [(k.replace("_", "-").encode(), v.encode()) for k, v in ({"host": "localhost:80"} | headers).items()]
    scope = {"type": kind, "path": path, "query_string": query.encode(), "headers": named}
    await door(scope, receive, send)
    return sent


def door(**more: Any) -> Door:
    return Door(inner, more.pop("token", "secret"), hint="open the URL", cookie="c", **more)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({}, 403),
        ({"query": "token=secret"}, 200),
        ({"query": "token=wrong"}, 403),
        ({"query": "token=wrong&token=secret"}, 403),
        ({"query": "x=1&token=secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer secret"}, 200),
        ({"authorization": "Basic secret"}, 403),
        ({"authorization": "Bearer "}, 403),
        ({"cookie": "a=b; c=secret"}, 200),
        ({"cookie": "c=wrong"}, 403),
        ({"cookie": "c"}, 403),
        ({"cookie": "c=\u00e9"}, 403),
        ({"cookie": "c=secret", "host": "evil.example"}, 400),
        ({"cookie": "c=secret", "host": "127.0.0.1.evil.example"}, 400),
        ({"cookie": "c=secret", "host": "[::1"}, 400),
        ({"cookie": "c=secret", "host": "127.0.0.1:9"}, 200),
        ({"cookie": "c=secret", "host": "[::1]:9"}, 200),
        ({"cookie": "c=secret", "origin": "http://evil.example"}, 403),
        ({"cookie": "c=secret", "origin": "null"}, 403),
        ({"cookie": "c=secret", "origin": "http://localhost:81"}, 403),
        ({"cookie": "c=secret", "origin": "http://localhost:80"}, 200),
    ],
)
async def test_who_comes_in(request_: dict[str, str], status: int) -> None:
    start, body = await knock(door(), **request_)
    assert start["status"] == status
    assert body["body"].startswith(b"in" if status == 200 else b"agentrl: this server ")


async def test_an_answer_without_the_token_says_how_to_get_in() -> None:
    assert (await knock(door()))[1]["body"] == b"agentrl: this server wants a token: open the URL\n"


async def test_the_url_with_the_token_gives_a_cookie() -> None:
    start, _ = await knock(door(), query="token=secret")
    assert start["headers"] == [(b"set-cookie", b"c=secret; Path=/; HttpOnly; SameSite=Strict")]
    for more in ({"authorization": "Bearer secret"}, {"cookie": "c=secret", "query": "token=5"}):
        assert (await knock(door(), **more))[0]["headers"] == []


async def test_without_a_token_all_of_this_machine_come_in_and_no_web_page() -> None:
    assert (await knock(door(token="")))[0]["status"] == 200
    assert (await knock(door(token=""), host="evil.example"))[0]["status"] == 400
    assert (await knock(door(token=""), origin="http://evil.example"))[0]["status"] == 403


async def test_a_server_for_programs_takes_no_origin_and_any_host() -> None:
    own = door(hosts=(), same_origin=False, free=("/health",))
    assert (await knock(own, host="gpu7:8000", authorization="Bearer secret"))[0]["status"] == 200
    assert (await knock(own, origin="http://localhost:80", authorization="Bearer secret"))[0]["status"] == 403
    assert (await knock(own, "/health"))[0]["status"] == 200
    assert (await knock(own, "/health/../pause"))[0]["status"] == 403
    assert (await knock(own, "/health", origin="http://x"))[0]["status"] == 403


async def test_a_websocket_without_the_token_is_closed() -> None:
    assert await knock(door(), kind="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_tokens_are_given_set_or_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_TOKEN", raising=False)
    assert len(choose_token(None)) >= 32
    assert choose_token(None) != choose_token(None)
    assert (choose_token("mine"), choose_token("")) == ("mine", "")
    monkeypatch.setenv("AGENTRL_TOKEN", "theirs")
    assert (choose_token(None), choose_token("mine"), choose_token("")) == ("theirs", "mine", "")
    with pytest.raises(UserError, match="letters, digits"):
        choose_token("a b")
