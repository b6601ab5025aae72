"""``agentrl index``: one command from files to a corpus."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from agentrl_tools.bm25_index import Corpus
from agentrl_tools.indexing import main

from agentrl import UserError


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("One.\n\nTwo.\n")
    Path("b.jsonl").write_text('{"name": "B", "body": "Three."}\n')


def test_one_command_makes_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a.txt", "--out", "c.db"]) == 0
    assert capsys.readouterr().out.startswith("c.db: 2 passages, 0.0 MB, ")
    with closing(Corpus(Path("c.db"))) as corpus:
        assert (len(corpus), corpus.find("two", 1)[0].title) == (2, "a")


def test_columns_are_settable() -> None:
    assert main(["b.jsonl", "--out", "c.db", "--title_column", "name", "--text_column=body"]) == 0
    with closing(Corpus(Path("c.db"))) as corpus:
        assert corpus.page("B")[0].text == "Three."


def test_what_is_there_is_written_over_only_by_force() -> None:
    main(["a.txt", "--out", "c.db"])
    with pytest.raises(UserError, match=r"'c\.db' exists; to write over it: --force"):
        main(["a.txt", "--out", "c.db"])
    for force in (["--force"], ["--force", "true"], ["--force=true"]):
        assert main(["a.txt", *force, "--out", "c.db"]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a.txt"], "--out is missing: the corpus"),
        (["--out", "c.db"], "takes: FILES... --out CORPUS.db"),
        (["a.txt", "--out", "c.db", "--id_colum", "x"], r"id_colum: unknown setting; did you mean 'id_column'"),
        (["a.txt", "--out", "c.db", "--force", "maybe"], "--force: .*boolean.*, not 'maybe'"),
        (["a.txt", "--out", "c.db", "--force=maybe"], "--force: .*boolean.*, not 'maybe'"),
        (["a.txt", "--out", "./a.txt", "--force"], "is one of the files to read"),
        (["b.jsonl", "--out", "c.db"], r"b\.jsonl, line 1: there is no 'text'"),
        (["gone.txt", "--out", "c.db"], "'gone.txt' is not there"),
    ],
)
def test_mistakes_are_sentences_and_nothing_is_written(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        main(words)
    assert sorted(p.name for p in Path().iterdir()) == ["a.txt", "b.jsonl"]


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in main.options.model_fields if f"--{name}" not in said] == []


@pytest.mark.parametrize("name", ["loop.txt", "loop.jsonl", "loop.parquet"])
def test_links_that_lead_to_themselves_are_a_sentence(name: str) -> None:
    Path(name).symlink_to(name)
    with pytest.raises(UserError, match=rf"{name}'?.*(is not there|symbolic links)"):
        main([name, "--out", "c.db"])
    assert not Path("c.db").exists()
