"""``agentrl index``: text files, JSON lines and Parquet become a corpus for the tool ``search``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from agentrl.errors import ConfigError, UserError, nearest
from agentrl.layers import read_overrides
from agentrl_tools.corpus import build
from agentrl_tools.passages import Columns, read

HELP = """usage: agentrl index FILES... --out CORPUS.db [--force true]

  agentrl index notes/*.txt --out notes.db
  agentrl index wiki.jsonl --out wiki.db --text_column body

Makes a corpus for the tool `search`. Of a text file each paragraph is a passage, with the file's name as its title.
JSON lines (.jsonl) and Parquet (.parquet) have a passage a row.

  --out           the corpus
  --force         whether to write over one that is there (false)
  --id_column     what a column is called (id; without one, passages are numbered)
  --title_column  (title; without one, it is the id)
  --text_column   (text)
"""
SETTINGS = {"out": str, "force": bool, "id_column": str, "title_column": str, "text_column": str}


def main(given: Sequence[str]) -> int:
    """Make a corpus of texts, for the tool search."""
    if not given or {"-h", "--help"} & set(given):
        print(HELP)
        return 0
    files = [Path(word) for word in takewhile(lambda w: not w.startswith("-"), given)]
    settings = _settings(given[len(files) :])
    if not files or "out" not in settings:
        raise ConfigError("agentrl index takes: FILES... --out CORPUS.db")
    out = Path(settings["out"])
    if out.exists() and settings.get("force") is not True:
        raise UserError(f"{str(out)!r} exists; to write over it: --force true")
    if out.resolve() in [file.resolve() for file in files]:
        raise UserError(f"{str(out)!r} is one of the files to read; name another --out")
    columns = Columns(**{name.removesuffix("_column"): v for name, v in settings.items() if name.endswith("_column")})
    begun = perf_counter()
    count = build(read(files, columns), out, _progress(begun))
    print(f"{out}: {count:,} passages, {out.stat().st_size / 1e6:,.1f} MB, {perf_counter() - begun:.1f} s")
    return 0


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """``--force`` may stand alone."""
    alone = ["--force=true" if w == "--force" and n not in ("true", "false") else w for w, n in pairwise([*words, ""])]
    source, given = read_overrides(alone)
    for name, value in given.items():
        if name not in SETTINGS:
            raise ConfigError(f"{name}: unknown setting{nearest(name, SETTINGS)} [{source}]")
        if SETTINGS[name] is bool and not isinstance(value, bool):
            raise ConfigError(f"--{name} is true or false, not {value!r}")
    return {name: value if SETTINGS[name] is bool else str(value) for name, value in given.items()}


def _progress(begun: float) -> Callable[[int], None]:
    """A line that is written over on a terminal, and nothing elsewhere."""

    def told(count: int) -> None:
        if sys.stderr.isatty():
            rate = count / max(perf_counter() - begun, 1e-9)
            print(f"\r{count:,} passages, {rate:,.0f}/s ", end="", file=sys.stderr, flush=True)

    return told
