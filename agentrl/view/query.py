"""The words of the search box: ``failed calls>3 tool=search "no such product"``.

A term is ``FIELD OPERATOR VALUE`` without spaces, a flag, or text that is looked for in the conversations. All must
hold; ``-`` in front of one turns it round. Of a question, an answer and an expected answer a part is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from agentrl.errors import UserError, nearest
from agentrl.types import Stop
from agentrl.view.arrays import Column
from agentrl.view.index import TEXTS, numbers, one

NUMBERS = {  # the word: the column of the index
    "step": "step",
    "task": "task",
    "member": "member",
    "reward": "reward",
    "advantage": "advantage",
    "calls": "n_calls",
    "refused": "n_refused",
    "turns": "turns",
    "seconds": "seconds",
    "slowest": "slowest",
}
WORDS = {"split": "split", "stop": "stop", "fault": "fault", "credit": "credit"}
OF_CALLS = {"tool": "name", "status": "status", "refused_by": "name"}  # of any call of the episode
FLAGS = ("failed", "solved", "faulted", "refusals")
OPERATORS: dict[str, Callable[[Column, float], Column]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "=": lambda a, b: a == b,
}
_TERM = re.compile(r"^([A-Za-z_]+)(<=|>=|!=|<|>|=|:)(.*)$", re.S)
_WORD = re.compile(r'-?[A-Za-z_]+(?:<=|>=|!=|[<>=:])"[^"]*"|-?"[^"]*"|\S+')


class Term(NamedTuple):
    """``field`` is a word of the lists above, or ``text``."""

    field: str
    operator: str
    value: str
    negated: bool = False


def parse(text: str) -> list[Term]:
    """The terms of a query.

    Raises:
        UserError: a field that does not exist, a number that is none; the sentence names the term.
    """
    return [_term(word) for word in _WORD.findall(text)]


def _term(word: str) -> Term:
    negated = len(word) > 1 and word.startswith("-")
    bare = word[1:] if negated else word
    if bare.startswith('"'):
        return Term("text", "=", bare.strip('"'), negated)
    if bare in FLAGS:
        return Term(bare, "=", "", negated)
    found = _TERM.match(bare)
    if found is None:
        return Term("text", "=", bare, negated)
    field, operator, value = found[1].lower(), found[2].replace(":", "="), found[3].strip('"')
    return _checked(Term(field, operator, value, negated), word)


def _checked(term: Term, word: str) -> Term:
    known = [*NUMBERS, *WORDS, *TEXTS, *OF_CALLS]
    if term.field not in known:
        hint = nearest(term.field, [*known, *FLAGS])
        raise UserError(f"{word!r}: no field {term.field!r} (in quotes it would be text){hint}")
    if term.field in NUMBERS and term.value != "none":
        try:
            float(term.value)
        except ValueError:
            raise UserError(f"{word!r}: {term.field} is compared with a number, not {term.value!r}") from None
    if (term.field not in NUMBERS or term.value == "none") and term.operator not in ("=", "!="):
        raise UserError(f"{word!r}: only = and != go with {term.field}={term.value}")
    return term


def matching(table: Any, terms: Iterable[Term]) -> tuple[Column, list[Term]]:
    """A mask over the rows of the index; and the terms that are text, which only the conversations can tell.

    Raises:
        UserError: a value that no episode has.
    """
    mask, texts = np.ones(table.num_rows, dtype=bool), []
    for term in terms:
        if term.field == "text":
            texts.append(term)
            continue
        mask &= _holds(table, term) != term.negated
    return mask, texts


def _holds(table: Any, term: Term) -> Column:
    if term.field in FLAGS:
        return _flag(table, term.field)
    if term.field in NUMBERS:
        values = numbers(table[NUMBERS[term.field]])
        if term.value == "none":
            return np.asarray(np.isnan(values) == (term.operator == "="))
        return np.asarray(OPERATORS[term.operator](values, float(term.value)) & ~np.isnan(values))
    if term.field in OF_CALLS:
        return _called(table, term)
    if term.field in TEXTS:
        hit = pc.fill_null(pc.match_substring(table[term.field], term.value, ignore_case=True), False)
        return np.asarray(one(hit).to_numpy(zero_copy_only=False).astype(bool) == (term.operator == "="))
    column = table[WORDS[term.field]]
    _check_value(term, column)
    equal = pc.fill_null(pc.equal(column, term.value), False)
    return np.asarray(one(equal).to_numpy(zero_copy_only=False).astype(bool) == (term.operator == "="))


def _called(table: Any, term: Term) -> Column:
    _check_value(term, pc.struct_field(one(table["calls"]).flatten(), OF_CALLS[term.field]))
    found = with_call(table, OF_CALLS[term.field], term.value, refused=term.field == "refused_by")
    return np.asarray(found == (term.operator == "="))


def with_call(table: Any, field: str, value: str, *, refused: bool = False) -> Column:
    """The episodes with a call whose field is so; and which was refused."""
    calls = one(table["calls"])
    flat = calls.flatten()
    hit = pc.equal(pc.struct_field(flat, field), value)
    if refused:
        hit = pc.and_(hit, pc.equal(pc.struct_field(flat, "status"), "refused"))
    found = np.zeros(table.num_rows, dtype=bool)
    mask = pc.fill_null(hit, False).to_numpy(zero_copy_only=False).astype(bool)
    found[pc.list_parent_indices(calls).to_numpy(zero_copy_only=False)[mask]] = True
    return found


def _check_value(term: Term, column: Any) -> None:
    values = [v for v in pc.unique(column).to_pylist() if v is not None]
    values += [*Stop] if term.field == "stop" else []
    if len(column) and term.value not in values:
        raise UserError(f"no episode here has {term.field}={term.value}{nearest(term.value, values)}")


def _flag(table: Any, name: str) -> Column:
    if name == "refusals":
        return numbers(table["n_refused"]) > 0
    if name == "faulted":
        return faulted(table)
    if name == "failed":
        return failed(table)
    return ~failed(table) & ~np.isnan(numbers(table["reward"]))


def faulted(table: Any) -> Column:
    return np.asarray(one(pc.is_valid(table["fault"])).to_numpy(zero_copy_only=False).astype(bool))


def middle(rewards: Column) -> float:
    """Half way between the worst and the best reward there was, 0 among them: less is a failure."""
    known = rewards[~np.isnan(rewards)]
    return (min(known.min(), 0.0) + max(known.max(), 0.0)) / 2 if len(known) else 0.0


def failed(table: Any) -> Column:
    """Faulted, without a reward, or with one in the lower half of what there was."""
    rewards = numbers(table["reward"])
    limit = middle(rewards)
    low = (rewards < limit) | ((rewards <= 0) & (limit >= 0))
    return low | np.isnan(rewards) | faulted(table)
