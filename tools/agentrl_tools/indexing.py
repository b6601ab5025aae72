"""``agentrl index``: text files, JSON lines and Parquet become a corpus for the tool ``search``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import UserError
from agentrl.settings.section import Section
from agentrl_tools.bm25_index import build_corpus
from agentrl_tools.passages import Columns, read_passages

TEXT = """\
  agentrl index notes/*.txt --out notes.db
  agentrl index wiki.jsonl --out wiki.db --text_column body

Makes a corpus for the tool `search`. Each paragraph of a text file becomes a passage, with the file's name as its
title. Each row of JSON lines (.jsonl) or Parquet (.parquet) becomes a passage.
"""


class _IndexOptions(Section):
    out: Path = Field(description="the corpus")
    force: bool = Field(False, description="write over a corpus that is there")
    id_column: str = Field("id", description="the column of ids; without one, passages are numbered")
    title_column: str = Field("title", description="the column of titles; without one, the id is the title")
    text_column: str = Field("text", description="the column of texts")


def _run(arguments: Arguments[_IndexOptions]) -> int:
    files, options = [Path(name) for name in arguments.names], arguments.options
    out = options.out
    if out.exists() and not options.force:
        raise UserError(f"{str(out)!r} exists; to write over it: --force")
    if os.path.realpath(out) in map(os.path.realpath, files):
        raise UserError(f"{str(out)!r} is one of the files to read; name another --out")
    columns = Columns(options.id_column, options.title_column, options.text_column)
    start = perf_counter()
    count = build_corpus(read_passages(files, columns), out, _report_progress(start))
    print(f"{out}: {count:,} passages, {out.stat().st_size / 1e6:,.1f} MB, {perf_counter() - start:.1f} s")
    return 0


def _report_progress(start: float) -> Callable[[int], None]:
    """Return a function that rewrites one line on a terminal, and prints nothing elsewhere."""

    def report(count: int) -> None:
        if sys.stderr.isatty():
            rate = count / max(perf_counter() - start, 1e-9)
            print(f"\r{count:,} passages, {rate:,.0f}/s ", end="", file=sys.stderr, flush=True)

    return report


main = Command(
    "index",
    "FILES... --out CORPUS.db [--force]",
    TEXT,
    _run,
    _IndexOptions,
    names=(1, None),
    summary="make a corpus of texts, for the tool search",
)
