"""Requests over HTTP to an endpoint that is the policy: their key, their body, and an answer in their dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.gateway.dialects.dialect import Conversation, Decode, Dialect
from agentrl.rollout.threads.forest import SampledTurn, TurnRefused
from agentrl.types import to_utf8_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
STATUS = {
    "invalid_api_key": 401,
    "episode_over": 410,
    "context_length_exceeded": 400,
    "invalid_request": 400,
    "server_ends": 503,
    "engine_failed": 500,
}


@dataclass(frozen=True)
class SampledAnswer:
    """The answer to a request: the request as its dialect reads it, and the turns that were sampled.

    Args:
        number: makes the answer's id.
    """

    asked: Dialect
    number: int
    model: str
    turns: Sequence[SampledTurn]
    decode: Decode


async def answer_request(
    request: Request, dialect: type[Dialect], sample: Callable[[Request], Awaitable[SampledAnswer]]
) -> Response:
    """Answer a request in a dialect by what ``sample`` returns; what goes wrong is an error in the dialect."""
    from starlette.responses import Response

    try:
        answer = await sample(request)
    except TurnRefused as refusal:
        return answer_json(dialect.format_error(refusal.code, str(refusal)), STATUS[refusal.code])
    except ValueError as error:
        return answer_json(dialect.format_error("invalid_request", str(error)), STATUS["invalid_request"])
    except Exception as error:  # the episode ends by it, and its client need not know more
        sentence = f"the episode ended by {type(error).__name__}"
        return answer_json(dialect.format_error("episode_over", sentence), STATUS["episode_over"])
    asked, given = answer.asked, (answer.number, answer.model, answer.turns, answer.decode)
    if not asked.streams:
        return answer_json(asked.format_answer(*given))
    return Response(b"".join(asked.format_events(*given)), media_type="text/event-stream")


def answer_json(content: Mapping[str, Any], status: int = 200) -> Response:
    """Make an answer of JSON, in ASCII: what a client sent and reads again need not be text that UTF-8 can hold."""
    from starlette.responses import Response

    return Response(json.dumps(content).encode(), status, media_type="application/json")


def list_model(model: str) -> Response:
    """Return the answer to ``/v1/models``."""
    return answer_json({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "agentrl"}]})


def read_key(request: Request) -> str:
    """Read a request's API key: a bearer, or Anthropic's header."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(request: Request) -> dict[str, Any]:
    """Read the body of a request. Raises TurnRefused: it is no JSON object."""
    raw = await request.body()
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
        if rb"\ud" in raw.lower():  # half a surrogate pair
            body = to_utf8_json(body)
    except (ValueError, RecursionError):
        raise TurnRefused("invalid_request", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise TurnRefused("invalid_request", "the body is no JSON object")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def read_request(dialect: type[Dialect], body: Mapping[str, Any], past: MutableMapping[str, Conversation]) -> Dialect:
    """Read a request in its dialect. Raises TurnRefused: it is not in the dialect's shape."""
    try:
        return dialect(body, past)
    except ValueError as error:
        raise TurnRefused("invalid_request", str(error)) from None
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        sentence = f"the request is not in the shape of {dialect.name} ({type(error).__name__}: {error})"
        raise TurnRefused("invalid_request", sentence) from None


async def _await_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def gather_turns(turns: Iterable[Coroutine[Any, Any, SampledTurn]]) -> list[SampledTurn]:
    """Sample turns at the same time. Where one is refused, nobody works on at the others: no client reads them."""
    tasks = [asyncio.ensure_future(turn) for turn in turns]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def unless_gone(request: Request, work: asyncio.Future[T]) -> T:
    """Await work; where the client goes away meanwhile, nobody works on.

    Raises:
        TurnRefused: it has gone, or the episode is over.
    """

    watching = asyncio.ensure_future(_await_disconnect(request))
    try:
        await asyncio.wait((work, watching), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        with suppress(asyncio.CancelledError):
            return await work
        raise TurnRefused("episode_over", "the episode is over, or its client has gone")
    finally:
        watching.cancel()
        work.cancel()
