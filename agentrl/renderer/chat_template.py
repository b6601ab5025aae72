"""Chat templates, which are programs of whoever made the model: rendered in a process with little memory and time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, TemplateError, suggest
from agentrl.runtime.bounded_worker import AnswerError, BeyondBounds, BoundedWorkers

_GIVEN = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
_LONGEST = 1 << 20  # characters of a template
_SHORT = 50_000  # characters of a conversation that no template of any use takes long for
_MOST_ACCOUNTS = 64  # of templates that are kept
_MOST_S, _EACH_S = 4.0, 0.02  # processor time of all short renderings, and what each gets beside
_MOST_CHARACTERS = 1 << 18  # written by all short renderings beyond what each may
_REPEATS = 8  # a rendering may be so many times as long as what it was given, the template beside
_workers = BoundedWorkers(
    Path(__file__).with_name("template_answer.py"), "answer_question", memory_bytes=256 << 20, cpu_s=3
)


@dataclass(slots=True)
class _Account:
    """The time and the characters of a template's short renderings together, beyond those that each may take."""

    seconds: float = 0.0
    characters: int = 0
    refusal: str = ""

    def add_seconds(self, spent: float) -> None:
        self.seconds = max(0.0, self.seconds + spent - _EACH_S)
        if self.seconds > _MOST_S:
            self.refusal = self.refusal or f"it takes too much time: {self.seconds:.0f} s for short conversations"

    def add_characters(self, written: int, allowed: int) -> None:
        self.characters = max(0, self.characters + written - allowed)
        if self.characters > _MOST_CHARACTERS:
            self.refusal = self.refusal or (
                f"it writes too much: {self.characters:,} characters more than short conversations have"
            )


_accounts: dict[str, _Account] = {}  # by the template's source, those that are used last at the end


def render_template(source: str, values: Mapping[str, Any]) -> str:
    """Render a template with values that JSON can hold.

    Raises:
        TemplateError: it raises an exception, takes too much memory or time, or writes too much: each time, or with
            short conversations in all, as it is rendered dozens of times before a run starts.
    """
    return _ask(source, {"values": values}).decode("utf-8", "surrogatepass")


def list_templates(tokenizer: Any) -> dict[str, str]:
    """Return the templates of a tokenizer that has several, by name; empty for one that has one, or none."""
    given = tokenizer.chat_template
    return dict(given) if isinstance(given, Mapping) else {}


def describe_choice(tokenizer: Any, template: str | None) -> str:
    """Say which of a tokenizer's templates are taken; empty where it has no several.

    Args:
        template: the source that is taken for all, if one is.
    """
    named = list_templates(tokenizer)
    if not named:
        return ""
    all_names = f"Of the model's templates ({', '.join(sorted(named))})"
    if template is not None:
        name = next((name for name, source in named.items() if source == template), "none")
        return f"{all_names} {name} is taken (--chat_template)."
    if "tool_use" not in named:
        return f"{all_names} default is taken; --chat_template NAME takes another one."
    return (
        f"{all_names} tool_use is taken where tools are offered, and default elsewhere; --chat_template NAME takes one "
        "for all."
    )


def list_words(tokenizer: Any, template: str | None) -> dict[str, str]:
    """List the words that a chat template reads beside the conversation, each with its default, as text, or none.

    Raises:
        TemplateError: as `render_template`.
    """
    named = template or tokenizer.chat_template
    words: dict[str, str] = {}
    for source in named.values() if isinstance(named, Mapping) else [named]:
        words |= {w: d for w, d in json.loads(_ask(source, {})).items() if not words.get(w)}
    given = {*_GIVEN, *tokenizer.special_tokens_map}
    return {word: default for word, default in sorted(words.items()) if word not in given}


def check_words(words: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Raise ConfigError where a template reads no such word, or a value is none that JSON can hold."""
    for word, value in words.items():
        if word not in known:
            hint = suggest(word, known) if known else "; it reads none"
            raise ConfigError(f"template.{word}: the chat template reads no such word{hint}")
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(f"template.{word} is {value!r:.80}; a template takes what JSON can hold") from None


def set_defaults(template: Any, words: Mapping[str, Any]) -> Any:
    """Return a template, or a mapping of them, whose words have these values where nobody says otherwise."""
    if isinstance(template, Mapping):
        return {name: set_defaults(source, words) for name, source in template.items()}
    lines = [f"{{%- if {w} is not defined %}}{{%- set {w} = {_write(v)} %}}{{%- endif %}}" for w, v in words.items()]
    return "".join([*lines, "{#- set by agentrl #}" if lines else "", template])


def _write(value: Any) -> str:
    """Write a value in Jinja, whose lists and texts are Python's, and whose constants may be lower case."""
    return repr(value)


def _ask(source: str, values: Mapping[str, Any]) -> bytes:
    if len(source) > _LONGEST:
        raise TemplateError(f"it has {len(source):,} characters, more than {_LONGEST:,}")
    account = _accounts[source] = _accounts.pop(source, _Account())
    if len(_accounts) > _MOST_ACCOUNTS:
        del _accounts[next(iter(_accounts))]
    if account.refusal:
        raise TemplateError(account.refusal)
    given = len(repr(values))
    is_short = given < _SHORT
    try:
        (text,) = _workers.ask({"template": source, **values}, account.add_seconds if is_short else None)
    except BeyondBounds as error:
        if is_short:
            account.refusal = str(error)
        raise TemplateError(str(error)) from None
    except AnswerError as error:
        raise TemplateError(str(error) or error.kind) from None
    if is_short:
        account.add_characters(len(text), len(source) + _REPEATS * given)
    return text


def render_chat(
    tokenizer: Any,
    template: str | None,
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    *,
    add_generation_prompt: bool = False,
    words: Mapping[str, Any] = {},
) -> str:
    """Render a conversation as the tokenizer's ``apply_chat_template`` does, its own template by default.

    Args:
        words: further values for the template, such as ``enable_thinking``.

    Raises:
        TemplateError: as `render_template`, or there is no such template.
    """
    offered = list(tools) or None
    try:
        source = tokenizer.get_chat_template(template, offered)
    except ValueError as error:
        raise TemplateError(str(error)) from None
    values = {**tokenizer.special_tokens_map, "messages": list(messages), "tools": offered, "documents": None}
    return render_template(source, {**words, **values, "add_generation_prompt": add_generation_prompt})


def find_shared_beginning(one: str, other: str) -> str:
    """Return the beginning that two renderings share."""
    return one[
        : next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    ]
