"""One episode: read from its file, and described piece by piece, so that no answer is too long."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

from agentrl.errors import UserError
from agentrl.runs import reader
from agentrl.runs.episode_info import EXPECTED, find_expected_answer
from agentrl.runs.reader import EpisodeId, Row
from agentrl.settings.documents import parse_json
from agentrl.types import ERROR_PREFIX, TOOL_ERRORS, Thread, find_failed_answers
from agentrl.view.call_matching import Record, list_calls, match_records
from agentrl.view.escaping import truncate
from agentrl.view.importance_ratio import segment_gradients, segment_log_ratios
from agentrl.view.store import Store
from agentrl.view.threads import number_turns, read_threads
from agentrl.view.tokens import CONTEXT, TokenTexts

LIMIT = 20_000  # characters of a text sent at once
TOKENS = 4_000  # sent at once
_RAW = 4_000  # characters of a call as it was written


def read_episode(store: Store, where: EpisodeId) -> Row:
    """Read an episode's row with all columns; those that an older run lacks are None, or empty lists.

    Raises:
        UserError: there is no such file, or no such row in it.
    """
    row = reader.read_row(store.folder, where)
    lists = ("segments", "calls", "rewards", "weights", "advantages", "step_rewards", "timings", "threads")
    scalars = {"fault_message": None, "credit": None, "weight": None}
    return {**scalars, **row, **{name: row.get(name) or [] for name in lists}}


def _parse_messages(row: Row) -> list[dict[str, Any]]:
    """Parse the conversation; empty if it cannot be read."""
    try:
        messages = parse_json(row.get("messages") or "[]")
    except ValueError:
        return []
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def _parse_info(row: Row) -> dict[str, Any]:
    """Parse the ``info`` of reset and steps, as far as it was kept; empty if it cannot be read."""
    try:
        info = parse_json(row.get("info") or "{}")
    except ValueError:
        return {}
    return info if isinstance(info, dict) else {}


def describe_info(row: Row) -> dict[str, Any]:
    """Return the expected answer, and the rest of ``info`` as JSON, both cut."""
    info = _parse_info(row)
    expected = find_expected_answer(info)
    rest = {k: v for k, v in info.items() if k not in EXPECTED}
    text = json.dumps(rest, ensure_ascii=False)
    return {"expected": expected and truncate(expected, 2_000), "more": truncate(text, 2_000) if rest else ""}


class _Turn(NamedTuple):
    """A turn of the model: its place among those that are trained, None of a side call; its number in time."""

    place: int | None
    number: int


def list_turns(thread: Thread, start: int) -> list[_Turn]:
    """List the turns of a thread, of which the first trained one has the place ``start``."""
    return [_Turn(start + i if thread.trained else None, number) for i, number in enumerate(thread.turns)]


def describe_messages(row: Row, texts: TokenTexts | None = None) -> list[dict[str, Any]]:
    """Describe the messages as the page shows them: each with its turn, and the outcome of each of its calls.

    Two turns of the same words have calls of the same ids. A call that could not be read has ``raw``, the text that
    the model wrote, if ``texts`` knows it, and ``why``, the reason. Of an agent's episode they are those of the thread
    that answered.
    """
    messages, start = _parse_messages(row), 0
    for thread in read_threads(row):
        if [dict(m) for m in thread.messages] == messages:
            return describe_turns(row, messages, list_turns(thread, start), texts)
        start += len(thread.turns) if thread.trained else 0
    turns = [_Turn(i, i) for i in range(sum(s["author"] == "model" for s in row["segments"]))]
    return describe_turns(row, messages, turns, texts)


def describe_turns(
    row: Row, messages: Sequence[Mapping[str, Any]], turns: Sequence[_Turn], texts: TokenTexts | None = None
) -> list[dict[str, Any]]:
    """Describe messages of which the last assistants' are turns of the model; those before them are the prompt's."""
    assistants = sum(m.get("role") == "assistant" for m in messages)
    own = [*[None] * (assistants - len(turns)), *turns[max(len(turns) - assistants, 0) :]]
    at = iter(own)
    described: list[dict[str, Any]] = []
    records: dict[Any, Row] = {}
    failed = find_failed_answers(messages, any(c["status"] in TOOL_ERRORS for c in row["calls"]))
    for number, message in enumerate(messages):
        entry = {"number": number, "role": str(message.get("role", "")), "name": str(message.get("name") or "")}
        entry |= cut_piece(_as_text(message.get("content")))
        if entry["role"] == "assistant":
            records, turn = {}, next(at)
            errors = _find_errors(messages[number + 1 :], failed[number + 1 :])
            place = turn.place if turn is not None else None
            calls = _describe_calls(message, errors, row, -1 if place is None else place, records, texts)
            entry |= {"turn": turn.number if turn is not None else None, "calls": calls}
        elif entry["role"] == "tool" and (record := records.get(message.get("tool_call_id"))):
            entry |= {"status": record["status"], "seconds": record["seconds"]}
        described.append(entry)
    return described


def _find_errors(later: Sequence[Mapping[str, Any]], failed: Sequence[bool]) -> dict[Any, str]:
    """Return the answers to failed calls before the next turn, by the calls' ids."""
    own = takewhile(lambda pair: pair[0].get("role") != "assistant", zip(later, failed, strict=True))
    return {m.get("tool_call_id"): _as_text(m.get("content")) for m, is_error in own if is_error}


def _describe_calls(
    message: Mapping[str, Any],
    errors: Mapping[Any, str],
    row: Row,
    turn: int,
    by_id: dict[Any, Row],
    texts: TokenTexts | None,
) -> list[dict[str, Any]]:
    """Describe the calls of a message, each with its record, which goes into ``by_id`` too."""
    calls = list_calls(message)
    records = match_records(calls, errors, [c for c in row["calls"] if c["turn"] == turn])
    described = []
    for call, record in zip(calls, records, strict=True):
        entry: dict[str, Any] = {"name": call.name, "arguments": cut_piece(_as_text(call.arguments))}
        if record is not None:
            entry |= {"status": record["status"], "seconds": record["seconds"]}
            by_id[call.id] = record
        if call.may_be_unread and call.id in errors:
            entry["why"] = truncate(errors[call.id].removeprefix(ERROR_PREFIX), _RAW)
            raw = _read_raw_call(row, turn, record, texts)
            entry |= {"raw": truncate(raw, _RAW)} if raw else {}
        described.append(entry)
    return described


def _read_raw_call(row: Row, turn: int, record: Record | None, texts: TokenTexts | None) -> str:
    """Return a call as it was written, or the whole turn where its place is not known; empty without a tokenizer."""
    own = [s["token_ids"] for s in row["segments"] if s["author"] == "model"]
    if texts is None or not 0 <= turn < len(own):
        return ""
    place = slice(record.get("start"), record.get("end")) if record else slice(None)
    written = "".join(texts.decode(own[turn][place]))
    return "" if texts.why else written.strip()


def _as_text(content: object) -> str:
    """Return text as it is; anything else as JSON."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def cut_piece(text: str, start: int = 0) -> dict[str, Any]:
    """Return at most ``LIMIT`` characters, and the number of all."""
    return {"text": text[start : start + LIMIT], "length": len(text)}


def find_text(row: Row, number: int, call: int | None, thread: int | None = None) -> str:
    """Return the text of a message, or of the arguments of a call in it.

    Args:
        thread: that it is in; by default the episode's conversation.

    Raises:
        UserError: there is none.
    """
    try:
        message: Mapping[str, Any] = (
            _parse_messages(row)[number] if thread is None else read_threads(row)[thread].messages[number]
        )
        if call is None:
            return _as_text(message.get("content"))
        return _as_text(message["tool_calls"][call]["function"]["arguments"])
    except (IndexError, KeyError, TypeError):
        raise UserError(f"the episode has no message {number}" + (f" with a call {call}" if call else "")) from None


def describe_segments(row: Row) -> list[dict[str, Any]]:
    """Describe each segment by its start and length in tokens; the model's by the turn and its advantage too.

    A prompt behind the first one has the number of its context, from 1. Of an agent's episode each has the number of
    its thread, and the model's the number of their turn in the order of time.
    """
    lengths = [len(s["token_ids"]) for s in row["segments"]]
    threads, turn, context, described = read_threads(row), 0, 0, []
    in_time = number_turns(threads)
    for s, end, length in zip(row["segments"], accumulate(lengths), lengths, strict=True):
        entry = {"author": s["author"], "start": end - length, "length": length}
        if s["author"] == "model":
            own = row["advantages"]
            entry |= {"turn": turn, "advantage": own[turn] if turn < len(own) else row["advantage"]}
            entry |= {"number": in_time[turn] if turn < len(in_time) else turn}
            turn += 1
        elif s["author"] == "prompt":
            context += 1
            entry |= {"context": context} if context > 1 else {}
        entry |= {"thread": context - 1} if threads else {}
        described.append(entry)
    return described


def describe_tokens(row: Row, texts: TokenTexts, start: int, limit: int = TOKENS) -> dict[str, Any]:
    """Describe the tokens from ``start`` on, in columns of one entry a token.

    Returns:
        ``texts`` and ``ids``; ``logprobs`` and ``versions``, null for tokens that are not the model's; ``log_ratios``,
        the logarithm of the learner's probability over the engine's, and ``gradients``, d loss / d logprob, null for
        tokens that were not trained.
    """
    end, at = start + limit, 0
    columns: dict[str, list[Any]] = {"texts": [], "ids": [], "logprobs": [], "versions": [], "log_ratios": []}
    columns["gradients"] = []
    for s in row["segments"]:
        count = len(s["token_ids"])
        low, high = max(start - at, 0), min(end - at, count)
        if low < high:
            before = max(low - CONTEXT, 0)
            columns["texts"] += texts.decode(s["token_ids"][before:high])[low - before :]
            for name, key in (("ids", "token_ids"), ("logprobs", "logprobs"), ("versions", "versions")):
                columns[name] += s[key][low:high] if s[key] is not None else [None] * (high - low)
            columns["log_ratios"] += segment_log_ratios(s)[low:high] or [None] * (high - low)
            columns["gradients"] += segment_gradients(s)[low:high] or [None] * (high - low)
        at += count
    return {"start": start, "total": at, "why": texts.why, **columns}
