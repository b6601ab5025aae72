"""The language of the search box."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from agentrl import UserError
from agentrl.credit import record_held_out
from agentrl.types import Group
from agentrl.view.index import SCHEMA
from agentrl.view.query import QueryTerm, match_episodes, parse_query
from agentrl.view.search import EpisodeSearch, list_episodes
from agentrl.view.store import Store
from tests.helpers import runs


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> EpisodeSearch:
    folder = tmp_path_factory.mktemp("query") / "run"
    run = runs.start(folder)
    for step in (1, 2):
        members = (runs.solved(7, step - 1), runs.wrong(7), runs.stuck(7), runs.lost(7))
        runs.write(run, step, [Group(7, members)])
    run.write_trajectories(2, record_held_out([Group(8, (runs.solved(8), runs.wrong(8)))]), "test")
    store = Store(folder)
    store.refresh()
    return EpisodeSearch(store)


def ids(search: EpisodeSearch, query: str, sort: str = "") -> list[str]:
    now, rows = search.rows(query, sort)
    return [row["id"] for row in list_episodes(now.table, rows)]


def test_terms_are_read() -> None:
    assert parse_query('failed calls>=3 -tool=search "no such" price') == [
        QueryTerm("failed", "=", ""),
        QueryTerm("calls", ">=", "3"),
        QueryTerm("tool", "=", "search", True),
        QueryTerm("text", "=", "no such"),
        QueryTerm("text", "=", "price"),
    ]
    assert parse_query('tool:"get price"') == [QueryTerm("tool", "=", "get price")]
    assert parse_query("   ") == []


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", 10),
        ("split=train", 8),
        ('question="hats COST" split=train', 6),
        ("expected=49 answer=49", 2),
        ("expected=56 answer!=56", 1),
        ("split!=train", 2),
        ('credit="held out"', 2),
        ("credit=trained split=train", 6),
        ("credit=fault", 2),
        ("failed split=train", 6),
        ("solved", 3),
        ("faulted", 2),
        ("-faulted split=train", 6),
        ("failed calls>3 tool=catalogue", 2),
        ("failed calls>4", 0),
        ("tool_errors", 2),
        ("failed_tool=catalogue", 2),
        ("status=tool_timeout", 2),
        ("fault=tool_timeout", 2),
        ("stop=max_turns", 2),
        ("stop=max_tokens", 0),
        ("reward=none", 2),
        ("reward!=none", 8),
        ("reward<0.5", 5),
        ("seconds>30 step=2", 1),
        ("tool!=price", 5),
        ("task=8", 2),
        ("catalogue", 2),
        ("-catalogue split=train", 6),
        ('"THE ANSWER is 49"', 2),
        ('"items are given by number" step<2', 1),
    ],
)
def test_episodes_are_found(search: EpisodeSearch, query: str, found: int) -> None:
    assert len(ids(search, query)) == found


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("rewrd<0.5", "'rewrd<0.5': no field 'rewrd' (in quotes it would be text); did you mean 'reward'?"),
        ("calls>many", "'calls>many': calls is compared with a number, not 'many'"),
        ("tool>price", "'tool>price': only = and != go with tool=price"),
        ("tool=prise", "no episode here has tool=prise; did you mean 'price'?"),
        ("stop=max_turn", "no episode here has stop=max_turn; did you mean 'max_turns'?"),
    ],
)
def test_what_cannot_be_searched_for_is_said(search: EpisodeSearch, query: str, sentence: str) -> None:
    with pytest.raises(UserError) as told:
        search.rows(query)
    assert str(told.value) == sentence


def test_the_newest_step_comes_first_and_any_number_can_order(search: EpisodeSearch) -> None:
    assert ids(search, "")[:3] == ["train-2:0", "train-2:1", "train-2:2"]
    assert ids(search, "")[-1] == "train-1:3"
    assert ids(search, "split=train", "-seconds")[:2] == ["train-1:3", "train-2:3"]
    assert ids(search, "split=train", "reward")[-2:] == ["train-1:3", "train-2:3"]  # no reward: last, either way
    assert ids(search, "split=train", "-reward")[-2:] == ["train-1:3", "train-2:3"]
    with pytest.raises(UserError, match="cannot be ordered by 'rewards'; did you mean 'reward'"):
        search.rows("", "rewards")


def test_failure_is_the_lower_half_of_what_there_was() -> None:
    def table(rewards: list[float | None]) -> object:
        rows: list[dict[str, object]] = [{"reward": r, "calls": []} for r in rewards]
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def failed(rewards: list[float | None]) -> list[bool]:
        return [bool(f) for f in match_episodes(table(rewards), parse_query("failed"))[0]]

    assert failed([0.0, 1.0, 0.4, 0.6, None]) == [True, False, True, False, True]
    assert failed([0.0, 0.0]) == [True, True]
    assert failed([-10.0, -1.0]) == [True, False]
    assert np.array_equal(match_episodes(table([]), parse_query("failed"))[0], [])
