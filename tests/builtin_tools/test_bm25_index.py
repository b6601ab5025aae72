"""A corpus: built aside, found by BM25, read by many threads, and never taken for something else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from agentrl_tools.bm25_index import Corpus, build_corpus, split_words
from agentrl_tools.passages import Passage

from agentrl import UserError

PASSAGES = [
    Passage("a", "Rivers", "The river Ilm runs to the sea."),
    Passage("b", "Rivers", "Another river is longer: the Saale."),
    Passage("c", "Cooking", "Boil the eggs; running water helps."),
    Passage("", "", "A passage without a name."),
]


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[Corpus]:
    assert build_corpus(PASSAGES, tmp_path / "c.db") == 4
    with closing(Corpus(tmp_path / "c.db")) as opened:
        yield opened


def test_the_best_comes_first_and_words_are_stemmed(corpus: Corpus) -> None:
    assert [hit.id for hit in corpus.find("how long is the river Ilm", 5)] == ["a", "b"]
    assert [hit.id for hit in corpus.find("egg run", 5)] == ["c", "a"]
    assert len(corpus.find("rivers", 1)) == 1
    assert corpus.find("unheard", 5) == []


def test_passages_without_a_name_are_numbered(corpus: Corpus) -> None:
    assert corpus.page("4") == [Passage("4", "4", "A passage without a name.")]


def test_a_page_is_found_by_id_or_by_title(corpus: Corpus) -> None:
    assert [p.id for p in corpus.page("b")] == ["b"]
    assert [p.id for p in corpus.page("rivers")] == ["a", "b"]
    assert corpus.page("gone") == []


@pytest.mark.parametrize(
    "query",
    [
        *(
            '"',
            "ilm AND",
            "NEAR(",
            "title:ilm",
            "ilm*",
            "^ilm",
            "{a b}:c",
            "ilm' OR 1=1 --",
            "-ilm",
            "\x00",
            "NOT",
            "+",
        ),
        *("a" * 100_000, "ilm " * 10_000, "😀", "ilm ?"),
    ],
)
def test_nothing_in_a_query_is_syntax(corpus: Corpus, query: str) -> None:
    found = corpus.find(query, 5)
    assert ("ilm" in split_words(query)) == ("a" in [hit.id for hit in found])


def test_common_words_count_only_alone() -> None:
    assert split_words("Who is the king of the hill?") == ["king", "hill"]
    assert split_words("who is it") == ["who", "is", "it"]
    assert split_words("!?_") == []
    assert len(split_words(" ".join(f"w{n}" for n in range(100)))) == 32


def test_words_that_many_hold_are_left_out_beside_rarer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_tools.bm25_index.MOST_MATCHES", 10)
    build_corpus(
        [Passage("", "", f"often {'rare' if n == 7 else ''} {'some' if n < 5 else ''}") for n in range(50)],
        tmp_path / "c.db",
    )
    with closing(Corpus(tmp_path / "c.db")) as corpus:
        assert [hit.id for hit in corpus.find("often rare", 5)] == ["8"]
        assert {hit.id for hit in corpus.find("often some rare", 9)} == {"1", "2", "3", "4", "5", "8"}
        assert len(corpus.find("often", 5)) == 5


def test_threads_may_ask_at_once(corpus: Corpus) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: corpus.find("Ilm" if n % 2 else "Saale", 1)[0].id, range(200)))
    assert found == ["b", "a"] * 100


def test_it_cannot_be_written(corpus: Corpus) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        corpus._read("DELETE FROM passages")


def test_the_snippet_is_about_the_words(tmp_path: Path) -> None:
    build_corpus([Passage("a", "a", "x " * 500 + "needle " + "y " * 500)], tmp_path / "c.db")
    with closing(Corpus(tmp_path / "c.db")) as corpus:
        [hit] = corpus.find("needle", 1)
        assert "needle" in hit.snippet
        assert len(hit.snippet) < 200


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    build_corpus(PASSAGES, path)
    before = path.read_bytes()

    def broken() -> Iterator[Passage]:
        yield PASSAGES[0]
        raise UserError("line 2")

    with pytest.raises(UserError, match="line 2"):
        build_corpus(broken(), path)
    with pytest.raises(UserError, match="two passages have the id 'a'; ids must differ"):
        build_corpus([PASSAGES[0], PASSAGES[0]], path)
    with pytest.raises(UserError, match="there are no passages"):
        build_corpus([], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.db"]


def test_where_it_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        build_corpus(PASSAGES, tmp_path / "no" / "c.db")


def test_what_is_no_corpus_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no corpus .*; make one: agentrl index FILES --out"):
        Corpus(tmp_path / "gone.db")
    (tmp_path / "text.db").write_text("not a database at all, but long enough " * 50)
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE t (x)")
    for name in ("text.db", "other.db"):
        with pytest.raises(UserError, match=f"{name}' is no corpus"):
            Corpus(tmp_path / name)
