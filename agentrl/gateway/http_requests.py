"""Requests over HTTP to an endpoint that is the policy: their key, their body, and an answer in their dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.gateway.dialects.dialect import Decode, Dialect
from agentrl.rollout.threads.forest import SampledTurn, TurnRefused

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
STATUS = {"invalid_api_key": 401, "episode_over": 410, "context_length_exceeded": 400, "invalid_request": 400}


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
    from starlette.responses import JSONResponse, Response

    try:
        answer = await sample(request)
    except TurnRefused as refusal:
        return JSONResponse(dialect.format_error(refusal.code, str(refusal)), STATUS[refusal.code])
    except ValueError as error:
        return JSONResponse(dialect.format_error("invalid_request", str(error)), STATUS["invalid_request"])
    except Exception as error:  # the episode ends by it, and its client need not know more
        sentence = f"the episode ended by {type(error).__name__}"
        return JSONResponse(dialect.format_error("episode_over", sentence), STATUS["episode_over"])
    asked, given = answer.asked, (answer.number, answer.model, answer.turns, answer.decode)
    if not asked.streams:
        return JSONResponse(asked.format_answer(*given))
    return Response(b"".join(asked.format_events(*given)), media_type="text/event-stream")


def list_model(model: str) -> Response:
    """Return the answer to ``/v1/models``."""
    from starlette.responses import JSONResponse

    return JSONResponse({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "agentrl"}]})


def read_key(request: Request) -> str:
    """Read a request's API key: a bearer, or Anthropic's header."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(request: Request) -> dict[str, Any]:
    """Read the body of a request. Raises TurnRefused: it is no JSON object."""
    try:
        body = await request.json()
    except ValueError:
        raise TurnRefused("invalid_request", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise TurnRefused("invalid_request", "the body is no JSON object")
    return body


async def _await_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
