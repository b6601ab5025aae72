"""The query language of the search box: ``failed calls>3 tool=search "no such product"``.

A term is ``FIELD OPERATOR VALUE`` without spaces, a flag, or text to find in the conversations. All terms must hold;
``-`` in front negates one. A question, an answer and an expected answer match by a part of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.environments.task_sampler import task_index
from agentrl.errors import UserError, suggest
from agentrl.types import TOOL_ERRORS, Stop
from agentrl.view.index import TEXTS, Column, as_array, as_floats

NUMBERS = {  # from the field to the column of the index
    "step": "step",
    "task": "task",
    "sample": "sample",
    "reward": "reward",
    "advantage": "advantage",
    "calls": "n_calls",
    "errors": "n_errors",
    "turns": "turns",
    "seconds": "seconds",
    "slowest": "slowest",
}
WORDS = {"split": "split", "stop": "stop", "fault": "fault", "credit": "credit"}
CALL_FIELDS = {"tool": "name", "status": "status", "failed_tool": "name"}  # of any call of the episode
FLAGS = ("failed", "solved", "faulted", "tool_errors")
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


class QueryTerm(NamedTuple):
    """One condition; ``field`` is a field or flag of the lists above, or ``text``."""

    field: str
    operator: str
    value: str
    negated: bool = False


def parse_query(text: str) -> list[QueryTerm]:
    """Split a query into its terms.

    Raises:
        UserError: a field that does not exist, a number that is none; the sentence names the term.
    """
    return [_parse_term(word) for word in _WORD.findall(text)]


def _parse_term(word: str) -> QueryTerm:
    negated = len(word) > 1 and word.startswith("-")
    bare = word[1:] if negated else word
    if bare.startswith('"'):
        return QueryTerm("text", "=", bare.strip('"'), negated)
    if bare in FLAGS:
        return QueryTerm(bare, "=", "", negated)
    match = _TERM.match(bare)
    if match is None:
        return QueryTerm("text", "=", bare, negated)
    field, operator, value = match[1].lower(), match[2].replace(":", "="), match[3].strip('"')
    return _check_term(QueryTerm(field, operator, value, negated), word)


def _check_term(term: QueryTerm, word: str) -> QueryTerm:
    known = [*NUMBERS, *WORDS, *TEXTS, *CALL_FIELDS]
    if term.field not in known:
        hint = suggest(term.field, [*known, *FLAGS])
        raise UserError(f"{word!r}: no field {term.field!r} (in quotes it would be text){hint}")
    if term.field in NUMBERS and term.value != "none":
        try:
            float(term.value)
        except ValueError:
            raise UserError(f"{word!r}: {term.field} is compared with a number, not {term.value!r}") from None
    if (term.field not in NUMBERS or term.value == "none") and term.operator not in ("=", "!="):
        raise UserError(f"{word!r}: only = and != go with {term.field}={term.value}")
    return term


def match_episodes(table: pa.Table, terms: Iterable[QueryTerm]) -> tuple[Column, list[QueryTerm]]:
    """Return a mask over the rows of the index, and the terms that are text, which need the conversations.

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


def _holds(table: pa.Table, term: QueryTerm) -> Column:
    if term.field in FLAGS:
        return _matches_flag(table, term.field)
    if term.field in NUMBERS:
        values = as_floats(table[NUMBERS[term.field]])
        if term.value == "none":
            return np.asarray(np.isnan(values) == (term.operator == "="))
        number = float(term.value)
        if term.field == "task" and number.is_integer():  # the environment's own integer is understood too
            number = float(task_index(int(number)))
        return np.asarray(OPERATORS[term.operator](values, number) & ~np.isnan(values))
    if term.field in CALL_FIELDS:
        return _matches_call(table, term)
    if term.field in TEXTS:
        hit = pc.fill_null(pc.match_substring(table[term.field], term.value, ignore_case=True), False)
        return np.asarray(as_array(hit).to_numpy(zero_copy_only=False).astype(bool) == (term.operator == "="))
    column = table[WORDS[term.field]]
    _check_value(term, column)
    equal = pc.fill_null(pc.equal(column, term.value), False)
    return np.asarray(as_array(equal).to_numpy(zero_copy_only=False).astype(bool) == (term.operator == "="))


def _matches_call(table: pa.Table, term: QueryTerm) -> Column:
    _check_value(term, pc.struct_field(as_array(table["calls"]).flatten(), CALL_FIELDS[term.field]))
    hit = has_call(table, CALL_FIELDS[term.field], term.value, failed=term.field == "failed_tool")
    return np.asarray(hit == (term.operator == "="))


def has_call(table: pa.Table, field: str, value: str, *, failed: bool = False) -> Column:
    """Return a mask of the episodes with a call whose ``field`` is ``value``, and which failed if ``failed``."""
    calls = as_array(table["calls"])
    flat = calls.flatten()
    hit = pc.equal(pc.struct_field(flat, field), value)
    if failed:
        hit = pc.and_(hit, pc.is_in(pc.struct_field(flat, "status"), pa.array(TOOL_ERRORS)))
    episodes = np.zeros(table.num_rows, dtype=bool)
    mask = pc.fill_null(hit, False).to_numpy(zero_copy_only=False).astype(bool)
    episodes[pc.list_parent_indices(calls).to_numpy(zero_copy_only=False)[mask]] = True
    return episodes


def _check_value(term: QueryTerm, column: pa.Array) -> None:
    values = [v for v in pc.unique(column).to_pylist() if v is not None]
    values += [*Stop] if term.field == "stop" else []
    if len(column) and term.value not in values:
        raise UserError(f"no episode here has {term.field}={term.value}{suggest(term.value, values)}")


def _matches_flag(table: pa.Table, name: str) -> Column:
    if name == "tool_errors":
        return as_floats(table["n_errors"]) > 0
    if name == "faulted":
        return is_faulted(table)
    if name == "failed":
        return is_failed(table)
    return ~is_failed(table) & ~np.isnan(as_floats(table["reward"]))


def is_faulted(table: pa.Table) -> Column:
    """Return a mask of the episodes that ended in a fault."""
    return np.asarray(as_array(pc.is_valid(table["fault"])).to_numpy(zero_copy_only=False).astype(bool))


def is_lost(table: pa.Table) -> Column:
    """Return a mask of the episodes that a fault of the world's ended; those that provoked theirs have the floor."""
    return is_faulted(table) & np.isnan(as_floats(table["reward"]))


def _failure_limit(rewards: Column) -> float:
    """Return the mean of the worst and the best reward, 0 among them: less is a failure."""
    known = rewards[~np.isnan(rewards)]
    return (min(known.min(), 0.0) + max(known.max(), 0.0)) / 2 if len(known) else 0.0


def is_failed(table: pa.Table) -> Column:
    """Return a mask of the episodes that faulted, have no reward, or one in the lower half of the range."""
    rewards = as_floats(table["reward"])
    limit = _failure_limit(rewards)
    low = (rewards < limit) | ((rewards <= 0) & (limit >= 0))
    return low | np.isnan(rewards) | is_faulted(table)
