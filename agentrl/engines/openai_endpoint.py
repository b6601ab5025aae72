"""Any server that speaks OpenAI's chat completions: to measure with, not to train with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import anyio
import httpx2

from agentrl.errors import UserError, WorldFault, nearest
from agentrl.renderer.chat import IN_TEXT, conversation, in_text, lines
from agentrl.types import Completion, JsonSchema, SamplingParams

PATIENCE_S = 1.0  # before the second try; doubles
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # the server may think otherwise later
TOLD_IN_TEXT = (
    "{url} takes no tools: the model is told of them in the system prompt, and its calls are read from what it writes "
    "(<tool_call> tags), which is another prompt than its own for tools. A vLLM server takes them with "
    "--enable-auto-tool-choice --tool-call-parser NAME, as agentrl serve starts it. What it said: {fault}"
)


class EndpointEngine:
    """Continues conversations of ``renderer.chat`` by asking a server. Used as an async context manager.

    Args:
        url: where ``/chat/completions`` is, such as ``http://127.0.0.1:8000/v1``.
        model: a name the server knows; ``None``: the only one it has.
        key_env: the environment variable that holds the key, if there is one. The key is put nowhere else.
        capacity: requests at once.
        tries: of each request, before it is the world's fault.

    Raises:
        UserError: on entering, where no server answers, the key is refused, or it has no such model.
    """

    max_context = 1 << 40  # bytes; only the server knows how many tokens it takes

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key_env: str = "OPENAI_API_KEY",
        capacity: int = 32,
        tries: int = 5,
        timeout_s: float = 120.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--endpoint takes a URL such as http://127.0.0.1:8000/v1, not {url!r}")
        self.url, self.model, self.key_env = url.rstrip("/").removesuffix("/chat/completions"), model, key_env
        self.capacity, self.tries, self.version = capacity, tries, 0
        self.calls_in_text = False  # once the server has refused tools
        self.notes: list[str] = []  # what whoever evaluates should know
        key = os.environ.get(key_env)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=capacity),
        )

    async def __aenter__(self) -> Self:
        try:
            known = await self._models()
            if known is None and not self.url.endswith("/v1"):  # as agentrl serve prints it
                self.url, bare = f"{self.url}/v1", self.url
                known = await self._models()
                self.url = bare if known is None else self.url
            self.model = _chosen(self.model, known, self.url)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """The assistant's next message, as bytes. Its logprobs are not known: they are 0.0, and must not be used.

        Raises:
            WorldFault: the server failed, or refused, as often as it was asked.
            UserError: the key is refused, or the server knows no such model or path.
        """
        tools, messages = conversation(token_ids)
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed % 2**31,
        }
        if params.top_p < 1.0:
            asked["top_p"] = params.top_p
        answer, in_text = await self._ask_with(tools, asked)
        try:
            (choice,) = answer["choices"]
            said = choice["message"]
            message: dict[str, Any] = {"role": "assistant", "content": said.get("content") or ""}
            if in_text:
                message[IN_TEXT] = True
            elif said.get("tool_calls"):
                message["tool_calls"] = said["tool_calls"]
        except (KeyError, ValueError, TypeError, AttributeError):
            raise WorldFault("endpoint_answer", f"{self.url} answered {answer!r:.200}, which has no message") from None
        ids = lines([message])
        cut = choice.get("finish_reason") == "length"
        return Completion(tuple(ids), (0.0,) * len(ids), (self.version,) * len(ids), "length" if cut else "stop")

    def end_session(self, session: str) -> None: ...

    async def update_weights(self, policy: Any, version: int) -> None:
        raise UserError("an endpoint's weights cannot be changed: it is for agentrl eval")

    async def _ask_with(self, tools: Sequence[JsonSchema], asked: dict[str, Any]) -> tuple[Any, bool]:
        """Ask with tools, or in text of a server that takes none. Return the answer, and True if it is in text."""
        messages = [{k: v for k, v in m.items() if k != IN_TEXT} for m in asked["messages"]]
        asked = {**asked, "messages": messages}
        if not tools:
            return await self._ask(asked), False
        plain = {**asked, "messages": in_text(messages, tools)}
        if self.calls_in_text:
            return await self._ask(plain), True
        try:
            return await self._ask({**asked, "tools": tools}), False
        except WorldFault as fault:
            if fault.kind not in ("endpoint_refused", "endpoint_failed") or "tool" not in str(fault).lower():
                raise
            answer = await self._ask(plain)
            if not self.calls_in_text:
                self.calls_in_text = True
                self.notes.append(TOLD_IN_TEXT.format(url=self.url, fault=fault))
            return answer, True

    async def _models(self) -> list[str] | None:
        """Those the server names; None where it does not tell."""
        try:
            response = await self._client.get(f"{self.url}/models")
        except httpx2.HTTPError as error:
            raise UserError(f"no server answers at {self.url}: {_why(error)}") from None
        self._check_key(response)
        try:
            return [str(m["id"]) for m in response.json()["data"]] if response.is_success else None
        except (KeyError, ValueError, TypeError):
            return None

    async def _ask(self, asked: dict[str, Any]) -> Any:
        wait, what = PATIENCE_S, ""
        for attempt in range(self.tries):
            try:
                response = await self._client.post(f"{self.url}/chat/completions", json=asked)
            except httpx2.HTTPError as error:
                what = _why(error)
            else:
                if response.is_success:
                    return _json(response)
                self._check_key(response)
                what = f"status {response.status_code}: {response.text[:300]}"
                if response.status_code == 404:
                    raise UserError(f"{self.url}/chat/completions, model {self.model!r}: {what}")
                if response.status_code not in AGAIN:
                    raise WorldFault("endpoint_refused", f"{self.url} refused a request, {what}")
                wait = max(wait, _asked_wait(response))
            if attempt + 1 < self.tries:
                await anyio.sleep(min(wait, 60.0))
                wait *= 2
        raise WorldFault("endpoint_failed", f"{self.url} failed {self.tries} times; the last time: {what}")

    def _check_key(self, response: httpx2.Response) -> None:
        if response.status_code in (401, 403):
            given = "is refused" if os.environ.get(self.key_env) else "is not set"
            raise UserError(f"{self.url} wants a key (status {response.status_code}): ${self.key_env} {given}")


def _chosen(model: str | None, known: list[str] | None, url: str) -> str:
    if known is None and model is None:
        raise UserError(f"{url} does not tell which models it has; say --model NAME")
    if known is not None and model is None:
        if len(known) == 1:
            return known[0]
        raise UserError(f"{url} has {len(known)} models; say --model NAME{nearest('', known)}")
    if known and model not in known:
        raise UserError(f"{url} has no model {model!r}{nearest(str(model), known)}")
    return str(model)


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _asked_wait(response: httpx2.Response) -> float:
    """Seconds the server asks us to wait."""
    try:
        return float(response.headers.get("retry-after", 0.0))
    except ValueError:  # a date
        return 0.0


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
