"""One episode, whole: read from its file, and told piece by piece, so that none is too long."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from agentrl import stored
from agentrl.episode_info import EXPECTED, expected_answer
from agentrl.errors import UserError
from agentrl.stored import Place, Row
from agentrl.types import REFUSAL, refused_answers
from agentrl.view import calls, ratio, raw_calls
from agentrl.view.store import Store
from agentrl.view.text import cut
from agentrl.view.tokens import CONTEXT, Texts

LIMIT = 20_000  # characters of a text sent at once
TOKENS = 4_000


def read(store: Store, where: Place) -> Row:
    """The row, all columns; those that an older run lacks are None.

    Raises:
        UserError: there is no such file, or no such row in it.
    """
    found = stored.row(store.folder, where)
    lists = ("segments", "calls", "rewards", "weights", "advantages", "step_rewards", "timings")
    nothing = {"fault_message": None, "credit": None, "weight": None}
    return {**nothing, **found, **{name: found.get(name) or [] for name in lists}}


def messages(row: Row) -> list[dict[str, Any]]:
    """The conversation; empty where it cannot be read."""
    try:
        found = json.loads(row.get("messages") or "[]")
    except ValueError:
        return []
    return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []


def info(row: Row) -> dict[str, Any]:
    """Read what reset and steps told, as it was kept; empty where it cannot be read."""
    try:
        found = json.loads(row.get("info") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def known(row: Row) -> dict[str, Any]:
    """Gather what a person wants to know beside the conversation: the expected answer, and what else ``info`` told."""
    told_info = info(row)
    right = expected_answer(told_info)
    more = {k: v for k, v in told_info.items() if k not in EXPECTED}
    text = json.dumps(more, ensure_ascii=False)
    return {"expected": right and cut(right, 2_000), "more": cut(text, 2_000) if more else ""}


def told(row: Row, texts: Texts | None = None) -> list[dict[str, Any]]:
    """The messages as the page shows them: the turn, and what became of each call, by its id within the turn.

    Two turns of the same words have calls of the same ids. A call that could not be read has ``raw``, what the model
    wrote, where ``texts`` knows it, and ``why``.
    """
    said = messages(row)
    turn = sum(s["author"] == "model" for s in row["segments"])
    turn -= sum(m.get("role") == "assistant" for m in said)  # those before the first turn are the prompt's
    found: list[dict[str, Any]] = []
    records: dict[Any, Row] = {}
    refused = refused_answers(said, any(c["status"] == "refused" for c in row["calls"]))
    for number, message in enumerate(said):
        shown = {"number": number, "role": str(message.get("role", "")), "name": str(message.get("name") or "")}
        shown |= piece(text_of(message.get("content")))
        if shown["role"] == "assistant":
            records = {}
            calls_ = _calls(message, _refused(said[number + 1 :], refused[number + 1 :]), row, turn, records, texts)
            shown |= {"turn": turn if turn >= 0 else None, "calls": calls_}
            turn += 1
        elif shown["role"] == "tool" and (record := records.get(message.get("tool_call_id"))):
            shown |= {"status": record["status"], "seconds": record["seconds"]}
        found.append(shown)
    return found


def _refused(later: Sequence[Mapping[str, Any]], refused: Sequence[bool]) -> dict[Any, str]:
    """Return what the calls that were refused before the next turn were told, by the calls' ids."""
    own = takewhile(lambda pair: pair[0].get("role") != "assistant", zip(later, refused, strict=True))
    return {m.get("tool_call_id"): text_of(m.get("content")) for m, refusal in own if refusal}


def _calls(
    message: Mapping[str, Any],
    refused: Mapping[Any, str],
    row: Row,
    turn: int,
    by_id: dict[Any, Row],
    texts: Texts | None,
) -> list[dict[str, Any]]:
    """The calls of a message, each with its record, which goes into ``by_id`` too."""
    asked = calls.asked(message)
    records = calls.matched(asked, refused, [c for c in row["calls"] if c["turn"] == turn])
    found = []
    raw = _raw(row, turn, len(asked), texts) if any(_unread(*call[1:]) for call in asked) else []
    for number, ((call_id, name, arguments), record) in enumerate(zip(asked, records, strict=True)):
        shown: dict[str, Any] = {"name": name, "arguments": piece(text_of(arguments))}
        if record is not None:
            shown |= {"status": record["status"], "seconds": record["seconds"]}
            by_id[call_id] = record
        if _unread(name, arguments) and call_id in refused:
            shown["why"] = cut(refused[call_id].removeprefix(REFUSAL), raw_calls.LONGEST)
            shown |= {"raw": cut(raw[number], raw_calls.LONGEST)} if raw else {}
        found.append(shown)
    return found


def _unread(name: str, arguments: Any) -> bool:
    """Return a call without name or arguments, which may be what could not be read."""
    return not name or not arguments


def _raw(row: Row, turn: int, count: int, texts: Texts | None) -> list[str]:
    """Return what the model wrote for each call of a turn; empty where that is not known."""
    own = [s["token_ids"] for s in row["segments"] if s["author"] == "model"]
    if texts is None or not 0 <= turn < len(own):
        return []
    written = "".join(texts.of(own[turn]))
    return [] if texts.why else raw_calls.split_calls(written, count)


def text_of(content: Any) -> str:
    """Text as it is; anything else as JSON."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def piece(text: str, start: int = 0) -> dict[str, Any]:
    """At most ``LIMIT`` characters, and how many there are."""
    return {"text": text[start : start + LIMIT], "length": len(text)}


def full_text(row: Row, number: int, call: int | None) -> str:
    """The text of a message, or of the arguments of a call in it. Raises UserError: there is none."""
    try:
        message = messages(row)[number]
        if call is None:
            return text_of(message.get("content"))
        return text_of(message["tool_calls"][call]["function"]["arguments"])
    except (IndexError, KeyError, TypeError):
        raise UserError(f"the episode has no message {number}" + (f" with a call {call}" if call else "")) from None


def segments(row: Row) -> list[dict[str, Any]]:
    """Each with its beginning and length in tokens; the model's with the turn and its advantage."""
    lengths = [len(s["token_ids"]) for s in row["segments"]]
    turn, found = 0, []
    for s, end, length in zip(row["segments"], accumulate(lengths), lengths, strict=True):
        shown = {"author": s["author"], "start": end - length, "length": length}
        if s["author"] == "model":
            own = row["advantages"]
            shown |= {"turn": turn, "advantage": own[turn] if turn < len(own) else row["advantage"]}
            turn += 1
        found.append(shown)
    return found


def tokens(row: Row, texts: Texts, start: int, limit: int = TOKENS) -> dict[str, Any]:
    """Columns, one entry a token, from ``start`` on: texts and ids; logprobs and versions, null where they are not the
    model's; the logarithms of the ratios of the learner's probabilities to the engine's, null where it was not trained.
    """
    end, at = start + limit, 0
    found: dict[str, list[Any]] = {"texts": [], "ids": [], "logprobs": [], "versions": [], "log_ratios": []}
    for s in row["segments"]:
        count = len(s["token_ids"])
        low, high = max(start - at, 0), min(end - at, count)
        if low < high:
            before = max(low - CONTEXT, 0)
            found["texts"] += texts.of(s["token_ids"][before:high])[low - before :]
            for name, key in (("ids", "token_ids"), ("logprobs", "logprobs"), ("versions", "versions")):
                found[name] += s[key][low:high] if s[key] is not None else [None] * (high - low)
            found["log_ratios"] += ratio.of_segment(s)[low:high] or [None] * (high - low)
        at += count
    return {"start": start, "total": at, "why": texts.why, **found}
