"""An engine over any server that speaks OpenAI's chat completions: for evaluation, not for training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import anyio
import httpx2

from agentrl.engines.server_keys import find_server_key
from agentrl.errors import InfraError, UserError, suggest
from agentrl.renderer.call_formats import hermes
from agentrl.renderer.json_lines import (
    IN_TEXT,
    WORDS,
    decode_conversation,
    decode_words,
    encode_lines,
    write_calls_in_text,
)
from agentrl.runtime.addresses import split_address
from agentrl.settings.secret import Secret, check_no_credentials
from agentrl.types import Completion, JsonSchema, SamplingParams

RETRY_WAIT_S = 1.0  # before the second try; doubles
RETRY_STATUS = {408, 409, 425, 429, 500, 502, 503, 504, 529}
NO_TOOLS_NOTE = (
    "{url} takes no tools: the model is told of them in the system prompt, and its calls are read from what it writes "
    "(<tool_call> tags), which is another prompt than its own for tools. A vLLM server takes them with "
    "--enable-auto-tool-choice --tool-call-parser NAME, as agentrl serve starts it. What it said: {fault}"
)


class EndpointEngine:
    """Continues conversations of ``renderer.json_lines`` by requests to a server. Used as an async context manager.

    Args:
        url: where ``/chat/completions`` is, such as ``http://127.0.0.1:8000/v1``; ``$NAME`` in it stays unseen.
        model: a name the server knows; ``None``: the only one it has.
        key_env: the environment variable that holds the key, if there is one. The key is put nowhere else. That of a
            server that this user started here by ``agentrl serve`` is found without it.
        capacity: concurrent requests.
        tries: of each request, before it is an infrastructure error.

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
        check_no_credentials({"endpoint": url})
        try:
            split_address(url)
        except ValueError as error:
            raise UserError(f"--endpoint takes a URL such as http://127.0.0.1:8000/v1, not {url!r} ({error})") from None
        self.url, self.model, self.key_env = url.rstrip("/").removesuffix("/chat/completions"), model, key_env
        self.capacity, self.tries, self.version = capacity, tries, 0
        self.calls_in_text = False  # once the server has refused tools
        self.notes: list[str] = []  # for the report of an evaluation
        key = os.environ.get(key_env) or find_server_key(url)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=capacity),
        )

    async def __aenter__(self) -> Self:
        try:
            models = await self._list_models()
            if models is None and not self.url.endswith("/v1"):  # as agentrl serve prints it
                self.url, bare = f"{self.url}/v1", self.url
                models = await self._list_models()
                self.url = bare if models is None else self.url
            self.model = _choose_model(self.model, models, self.url)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Request the assistant's next message, as bytes. Its logprobs are unknown: they are 0.0, and must not be used.

        Raises:
            InfraError: the server failed every try, or refused the request.
            UserError: the key is refused, or the server knows no such model or path.
        """
        tools, messages = decode_conversation(token_ids)
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed % 2**31,
        }
        if words := decode_words(token_ids):
            body[WORDS] = words
        if params.top_p < 1.0:
            body["top_p"] = params.top_p
        if params.stop is not None:
            body["stop"] = list(params.stop.strings)
        answer, in_text = await self._request_message(tools, messages, body)
        try:
            (choice,) = answer["choices"]
            reply = choice["message"]
            message: dict[str, object] = {"role": "assistant", "content": reply.get("content") or ""}
            if reply.get("tool_calls") and not in_text:
                message["tool_calls"] = reply["tool_calls"]
            elif in_text or (tools and hermes.parse(str(message["content"])).tool_calls):
                message[IN_TEXT] = True  # those that the server could not read, too: the model is told why
        except (KeyError, ValueError, TypeError, AttributeError):
            raise InfraError("endpoint_answer", f"{self.url} answered {answer!r:.200}, which has no message") from None
        ids = encode_lines([message])
        cut = choice.get("finish_reason") == "length"
        return Completion(tuple(ids), (0.0,) * len(ids), (self.version,) * len(ids), "length" if cut else "stop")

    def end_session(self, session: str) -> None: ...

    async def update_weights(self, policy: object, version: int) -> None:
        raise UserError("an endpoint's weights cannot be changed: it is for agentrl eval")

    async def _request_message(
        self, tools: Sequence[JsonSchema], messages: Sequence[JsonSchema], body: dict[str, object]
    ) -> tuple[Any, bool]:
        """Send the tools, or describe them in text to a server that takes none.

        Returns:
            The server's answer, and True if calls stand in its text.
        """
        messages = [{k: v for k, v in m.items() if k != IN_TEXT} for m in messages]
        if not tools:
            return await self._post({**body, "messages": messages}), False
        in_text = {**body, "messages": write_calls_in_text(messages, tools)}
        if self.calls_in_text:
            return await self._post(in_text), True
        try:
            return await self._post({**body, "messages": messages, "tools": tools}), False
        except InfraError as fault:
            if fault.kind not in ("endpoint_refused", "endpoint_failed") or "tool" not in str(fault).lower():
                raise
            answer = await self._post(in_text)
            if not self.calls_in_text:
                self.calls_in_text = True
                self.notes.append(NO_TOOLS_NOTE.format(url=self.url, fault=fault))
            return answer, True

    async def _list_models(self) -> list[str] | None:
        """List the models that the server names; None if it does not list them."""
        try:
            response = await self._client.get(Secret(f"{self.url}/models").reveal())
        except httpx2.HTTPError as error:
            raise UserError(f"no server answers at {self.url}: {_describe_error(error)}") from None
        self._check_key(response)
        try:
            return [str(m["id"]) for m in response.json()["data"]] if response.is_success else None
        except (KeyError, ValueError, TypeError):
            return None

    async def _post(self, body: dict[str, object]) -> Any:
        """Post a request, several times if the server fails; return the answer's JSON."""
        wait, failure = RETRY_WAIT_S, ""
        for attempt in range(self.tries):
            try:
                response = await self._client.post(Secret(f"{self.url}/chat/completions").reveal(), json=body)
            except httpx2.HTTPError as error:
                failure = _describe_error(error)
            else:
                if response.is_success:
                    return _parse_json(response)
                self._check_key(response)
                failure = f"status {response.status_code}: {response.text[:300]}"
                if response.status_code == 404:
                    raise UserError(f"{self.url}/chat/completions, model {self.model!r}: {failure}")
                if response.status_code not in RETRY_STATUS:
                    raise InfraError("endpoint_refused", f"{self.url} refused a request, {failure}")
                wait = max(wait, _read_retry_after(response))
            if attempt + 1 < self.tries:
                await anyio.sleep(min(wait, 60.0))
                wait *= 2
        raise InfraError("endpoint_failed", f"{self.url} failed {self.tries} times; the last time: {failure}")

    def _check_key(self, response: httpx2.Response) -> None:
        if response.status_code in (401, 403):
            problem = "is refused" if os.environ.get(self.key_env) else "is not set"
            raise UserError(f"{self.url} wants a key (status {response.status_code}): ${self.key_env} {problem}")


def _choose_model(model: str | None, models: list[str] | None, url: str) -> str:
    if models is None and model is None:
        raise UserError(f"{url} does not tell which models it has; say --model NAME")
    if models is not None and model is None:
        if len(models) == 1:
            return models[0]
        raise UserError(f"{url} has {len(models)} models; say --model NAME{suggest('', models)}")
    if models and model not in models:
        raise UserError(f"{url} has no model {model!r}{suggest(str(model), models)}")
    return str(model)


def _parse_json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _read_retry_after(response: httpx2.Response) -> float:
    """Read the seconds that the server wants us to wait."""
    try:
        return float(response.headers.get("retry-after", 0.0))
    except ValueError:  # a date
        return 0.0


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
