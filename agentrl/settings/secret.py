"""Secrets: a setting says ``$NAME``; the value is read from the environment where it is used, and written nowhere.

config.toml, the model card, trackers and messages have the setting as it was written. A server may repeat the value in
its own words: `scrub` takes it out of all text that leaves for a file, a screen, a tracker or a model's context.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

from pydantic_core import core_schema

from agentrl.errors import ConfigError, UserError, suggest

SHORTEST = 8  # characters of a value that is taken out of text; a shorter one is a word
_NAME = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)\}|(?P<bare>[A-Z_][A-Z0-9_]*))")
_TELLING = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)$")  # the names of variables that hold a secret

_PARAMETER = r"key|token|secret|sig|signature|password|passwd|pwd|auth|[\w-]*(?:api[-_]?key|[-_]token|[-_]secret)"
_LITERALS = (
    re.compile(r"\w://[^/\s?#@:]*:(?P<value>[^/\s?#@]+)@"),
    re.compile(rf"[?&](?:{_PARAMETER})=(?P<value>[^&\s#]+)", re.I),
    re.compile(
        r"\b(?:authorization|[\w-]*api-key)\s*[:=]\s*(?:(?:bearer|basic|token)\s+)?(?P<value>[^\s\"']{8,})", re.I
    ),
    re.compile(r"--(?:api[-_]?key|[\w-]*token|password|secret)[ =](?P<value>[^\s\"']{8,})", re.I),
)
_HEX = re.compile("%[0-9A-F]{2}")
_REMOTE = re.compile(r"(?:[\w-]+:)?\w+://|mcp:|--")  # what begins so is an address or a command, not a text
_HEADER = re.compile(r"\bheaders\.[\w-]*(?:auth|key|token|cookie|secret)[\w-]*$", re.I)

_revealed: dict[str, str] = {}  # values that were used, and what stands for them


class Secret:
    """A setting's text with ``$NAME`` or ``${NAME}`` in it. It is shown, written and compared as it was given.

    As the type of a tool's, an environment's or a reward's argument it takes such a text, and nothing else.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text with the environment's values in the place of the names.

        Raises:
            UserError: there is no such variable.
        """
        return _NAME.sub(_look_up, self._text)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Secret({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def _validate(cls, value: object) -> Secret:
        if isinstance(value, Secret):
            return value
        if not isinstance(value, str) or not _NAME.search(value):
            raise ValueError("a secret is given as $NAME: put it into the environment variable NAME")
        return cls(value)


def _look_up(match: re.Match[str]) -> str:
    name = match["braced"] or match["bare"]
    value = os.environ.get(name)
    if not value:
        known = [n for n in os.environ if _TELLING.search(n)]
        raise UserError(
            f"there is no environment variable {name!r}, which a setting names by ${name}{suggest(name, known)}"
        )
    _revealed[value] = f"${name}"
    return value


def scrub(text: str) -> str:
    """Return the text with ``$NAME`` for each secret in it, also where it is quoted or in base64.

    Secrets are the values that were revealed, and those of variables whose names end in KEY, TOKEN, SECRET or PASSWORD.
    """
    spelled = _spell(_read_environment(), tuple(_revealed.items()))
    if spelled is None:
        return text
    pattern, names = spelled
    return pattern.sub(lambda match: names[match[0]], text)


def _read_environment() -> tuple[tuple[str | bytes, str | bytes], ...]:
    """Read the environment as it is held where that shows: to decode all of it takes longer than to look for it."""
    return tuple(vars(os.environ).get("_data", os.environ).items())


def _is_telling(value: str) -> bool:
    return len(value) >= SHORTEST and not value.isdigit() and not value.startswith(("/", "~")) and " " not in value


@lru_cache(8)
def _spell(
    environment: tuple[tuple[str | bytes, str | bytes], ...], revealed: tuple[tuple[str, str], ...]
) -> tuple[re.Pattern[str], Mapping[str, str]] | None:
    """Return a pattern for all spellings of the secrets, and the names by spelling."""
    variables = ((os.fsdecode(name), os.fsdecode(value)) for name, value in environment)
    values = {value: f"${name}" for name, value in variables if _TELLING.search(name)} | dict(revealed)
    names = {spelling: n for value, n in values.items() if _is_telling(value) for spelling in _list_spellings(value)}
    longest_first = sorted(names, key=len, reverse=True)
    return (re.compile("|".join(map(re.escape, longest_first))), names) if names else None


def _list_spellings(value: str) -> Iterator[str]:
    """Yield a value as it stands in URLs, JSON, Python, HTML and base64, whatever stands around it there."""
    yield from (value, repr(value)[1:-1], html.escape(value), html.escape(value, quote=False))
    in_json = json.dumps(value)[1:-1]
    yield from (in_json, in_json.replace("/", r"\/"), json.dumps(in_json)[1:-1])
    in_bytes = value.encode("utf-8", "surrogateescape")
    for quoted in (quote(in_bytes, ""), quote(in_bytes), quote_plus(in_bytes), quote(in_bytes, "/+=")):
        yield from (quoted, _HEX.sub(lambda byte: byte[0].lower(), quoted), quote(quoted, safe=""))
    for before in range(3):  # bytes of what precedes it in a group of three, such as "user:" in Basic authorization
        content = bytes(before) + in_bytes
        inner = slice((8 * before + 5) // 6, 8 * len(content) // 6)
        yield from (base64.b64encode(content).decode()[inner], base64.urlsafe_b64encode(content).decode()[inner])


def check_no_credentials(settings: Mapping[str, Any]) -> None:
    """Refuse a key that stands in a setting itself: it would be written into config.toml and pushed with a model card.

    Args:
        settings: by dotted names.

    Raises:
        ConfigError: a URL, a header or a command has one; the sentence names the setting, and not the key.
    """
    for name, value in settings.items():
        for text in _texts(value):
            if (shown := hide_credentials(text)) != text or (_HEADER.search(name) and not _NAME.search(text)):
                shown = shown if shown != text else "***"
                raise ConfigError(
                    f"{name}: {shown!r} has a key in it, which would be written where settings are; put the key into "
                    "an environment variable, and write its name there: $NAME"
                )


def hide_credentials(text: str) -> str:
    """Return an address or a command with ``***`` for each key that stands in it. Other texts are left as they are."""
    if not _REMOTE.match(text):
        return text
    for pattern in _LITERALS:
        text = pattern.sub(_hide, text)
    return text


def _hide(match: re.Match[str]) -> str:
    if "$" in match["value"] or match["value"] == "***":
        return match[0]
    start, end = match.start("value") - match.start(), match.end("value") - match.start()
    return f"{match[0][:start]}***{match[0][end:]}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for own in value.values() for text in _texts(own))
    elif isinstance(value, list | tuple):
        yield from (text for own in value for text in _texts(own))
