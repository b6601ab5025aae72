"""The ends of a model's turns, read off its template: the text behind a turn, and the tokens that end one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import TemplateError
from agentrl.renderer.chat_template import find_shared_beginning
from agentrl.renderer.probe_turns import REPLY, REPLY_TEXT, USER_TURN, Render, make_probe_result


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The ends of a model's turns.

    ``closing`` is the text that the template writes behind one where something follows, ``closer`` the first added
    token in it, or empty, and ``stops`` the tokens that end a turn when sampled, by id.
    """

    closing: str
    closer: str
    stops: Mapping[int, str]


def learn_turn_ends(render: Render, tokenizer: Any, name: str, added: Mapping[str, int], thought_end: str) -> TurnEnds:
    """Learn how a template ends the model's turns.

    Args:
        name: of the tokenizer.
        added: ids of the tokens that are structure, by their text.
        thought_end: the mark that ends a thought.

    Raises:
        TemplateError: it loses the model's text, or no token ends a turn.
    """
    try:
        closing, last = _find_closings(render, added)
    except TemplateError as error:
        raise TemplateError(
            f"the chat template of {name!r} cannot render a user and an assistant turn: {error}; "
            "give another one with --chat_template FILE"
        ) from error
    closer = find_first_added(closing, added)
    stops = _find_stops(render, closer, find_first_added(last, added), tokenizer.eos_token or "", added)
    return TurnEnds(closing, closer, {i: s for i, s in stops.items() if not thought_end.startswith(s)} or stops)


def select_special(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """Return the special tokens among ids: a config may say 2 by default, where 2 is a letter or ``<tool_call>``."""
    added = tokenizer.added_tokens_decoder
    return {i: added[i].content for i in ids if i in added and added[i].special}


def find_first_added(text: str, added: Mapping[str, int]) -> str:
    """Return the added token that comes first in a text, the longest there; empty if there is none."""
    return min(((text.index(t), -len(t), t) for t in added if t in text), default=(0, 0, ""))[2]


def cut_closing(last: str, followed: str, added: Mapping[str, int]) -> str:
    """Return the part of a turn's end that stays once something follows: but for a token that ends it all.

    Raises:
        TemplateError: something else goes.
    """
    kept = find_shared_beginning(last, followed)
    cut = (i for i in range(len(last)) if any(i < len(kept) < i + len(t) for t in added if last.startswith(t, i)))
    kept = kept[: next(cut, None)]
    gone = last[len(kept) :].strip()
    if not gone:
        return kept
    if gone not in added:
        raise TemplateError("it rewrites the turns before")
    if kept.strip() or not (other := find_first_added(followed, added)):
        return kept
    return followed[: followed.index(other) + len(other)]  # another token ends a turn that is not the last


def _find_closings(render: Render, added: Mapping[str, int]) -> tuple[str, str]:
    """Return the text that the template puts after the model's own, with something behind it and at the end.

    Mostly they are one. Phi's ends a conversation with its eos, and gpt-oss' last turn has another end.
    """
    turns = render([USER_TURN, REPLY])
    if REPLY_TEXT not in turns:
        raise TemplateError("it loses or alters the model's text")
    last = turns.rpartition(REPLY_TEXT)[2]
    try:
        _, said, followed = render([USER_TURN, REPLY, USER_TURN]).rpartition(REPLY_TEXT)
        return cut_closing(last, followed, added) if said else last, last
    except TemplateError:
        return last, last


def _find_stops(render: Render, closer: str, last: str, eos: str, added: Mapping[str, int]) -> dict[int, str]:
    """Return the tokens that end the model's turn when sampled, by id.

    Some templates end no turn (GLM's): there the model is stopped by the token that begins the next one.

    Args:
        last: the token that ends a turn with nothing behind it, or none.
    """
    stops = [closer, last]
    for message in () if closer else (USER_TURN, make_probe_result(0)):
        try:
            stops.append(find_first_added(render([USER_TURN, REPLY, message]).rpartition(REPLY_TEXT)[2], added))
        except TemplateError:
            continue  # no such role
    ids = {added[s]: s for s in (*stops, eos) if s in added}
    if not ids:
        raise TemplateError("no token ends a turn, neither the template's nor the tokenizer's; set eos_token")
    return ids
