"""Passages: read from text, JSON lines and Parquet, and every slip in them named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agentrl_tools.passages import Columns, Passage, read_passages

from agentrl import UserError


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_of_a_text_each_paragraph_is_a_passage(tmp_path: Path) -> None:
    file = written(tmp_path, "notes.txt", "\n one\ntwo \n\n \nthree\n")
    assert list(read_passages([file])) == [Passage("", "notes", "one two"), Passage("", "notes", "three")]


def test_json_lines_have_a_passage_a_row(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", '{"id": 7, "title": "T", "text": "x"}\n\n{"text": "y", "more": 1}\n')
    assert list(read_passages([file])) == [Passage("7", "T", "x"), Passage("", "", "y")]


def test_columns_may_be_called_otherwise_and_files_may_be_many(tmp_path: Path) -> None:
    one = written(tmp_path, "a.jsonl", '{"key": "k", "body": "x"}')
    two = tmp_path / "b.parquet"
    pq.write_table(pa.table({"key": ["p", "q"], "body": ["y", "z"], "other": [1, 2]}), two)
    found = list(read_passages([one, two], Columns(id="key", text="body")))
    assert found == [Passage("k", "k", "x"), Passage("p", "p", "y"), Passage("q", "q", "z")]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"text": "x"}\n{broken', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", "[1]", r"a\.jsonl, line 1: a row must be a JSON object, not \[1\]"),
        ("a.jsonl", '{"txt": "x"}', r"line 1: there is no 'text'; did you mean 'txt'\? \(--text_column NAME\)"),
        ("a.jsonl", '{"text": " "}', "line 1: 'text' must be a text that is not empty"),
        ("a.jsonl", '{"text": 5}', "line 1: 'text' must be a text that is not empty, not 5"),
        ("a.jsonl", '{"text": "x", "id": [1]}', r"line 1: 'id' must be a text or a whole number, not \[1\]"),
        ("a.txt", b"abc\xff", r"a\.txt' is no text in UTF-8: .* at byte 3"),
        ("a.parquet", b"nonsense, long enough to be looked at", r"a\.parquet is no Parquet file"),
    ],
)
def test_a_slip_is_a_sentence_that_names_its_place(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        list(read_passages([written(tmp_path, name, text)]))


def test_a_parquet_file_without_the_column_says_which_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"texts": ["y"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="there is no 'text'; did you mean 'texts'"):
        list(read_passages([tmp_path / "b.parquet"]))


def test_half_characters_are_replaced(tmp_path: Path) -> None:
    [passage] = read_passages([written(tmp_path, "a.jsonl", '{"text": "a\\ud800b"}')])
    assert passage.text == "a?b"


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there"):
        list(read_passages([tmp_path / "gone.txt"]))
    with pytest.raises(UserError, match="is a folder; name its files"):
        list(read_passages([tmp_path]))
