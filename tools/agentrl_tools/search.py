"""search: BM25 over a corpus of one's own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from agentrl import ContractError, ToolError, Toolset, tool
from agentrl.runtime.threads import run_in_thread
from agentrl_tools.bm25_index import Corpus, Hit, build_corpus, split_words
from agentrl_tools.passages import Passage

AT_ONCE = 16  # queries, in threads
PAGE_CHARS = 2000


class Search(Toolset):
    """Search a corpus that ``agentrl index FILES --out CORPUS.db`` made.

    Args:
        index: the corpus; or, in Python, passages, of which one is made for the run.
        k: how many results a search has.
        max_chars: of a passage, in a result; ``open_page`` shows all of it.
    """

    named_by = "index"

    def __init__(self, index: str | Path | Iterable[Passage], k: int = 5, max_chars: int = 300) -> None:
        if k < 1 or max_chars < 1:
            raise ContractError(f"tool 'search': k and max_chars are 1 or more, not {k} and {max_chars}")
        self.index, self.k, self.max_chars = index, k, max_chars

    @asynccontextmanager
    async def open(self) -> AsyncIterator[_CorpusReader]:
        with tempfile.TemporaryDirectory(prefix="agentrl-corpus-", ignore_cleanup_errors=True) as folder:
            path = Path(self.index) if isinstance(self.index, str | Path) else Path(folder) / "corpus.db"
            if not isinstance(self.index, str | Path):
                await to_thread.run_sync(build_corpus, self.index, path)
            corpus = await to_thread.run_sync(Corpus, path)
            try:
                yield _CorpusReader(corpus)
            finally:
                corpus.close()

    @tool
    async def search(self, query: str) -> str:
        """Search the corpus.

        Args:
            query: a few words.
        """
        if not split_words(query):
            raise ToolError("the query has no words")
        hits = await self.shared.find(query, self.k)
        return "\n".join(f"{n}. {self._format_hit(hit)}" for n, hit in enumerate(hits, 1)) or "nothing found"

    @tool
    async def open_page(self, title_or_id: str, page: int = 1) -> str:
        """Read all of a page.

        Args:
            title_or_id: as a search shows it.
            page: which part, of a long one.
        """
        passages = await self.shared.page(title_or_id.strip())
        if not passages:
            close = dict.fromkeys(hit.title for hit in await self.shared.find(title_or_id, 3))
            raise ToolError(f"there is no page {title_or_id!r:.100}{'; there is: ' if close else ''}{', '.join(close)}")
        parts = _split_pages("\n".join(p.text for p in passages))
        if not 1 <= page <= len(parts):
            raise ToolError(f"page {passages[0].title!r} has the parts 1 to {len(parts)}, not {page}")
        return parts[page - 1] + (f"\n(part {page} of {len(parts)})" if len(parts) > 1 else "")

    def _format_hit(self, hit: Hit) -> str:
        """Format a hit: the id if it says more than the title, the text if it is short."""
        name = hit.title if hit.id == hit.title else f"{hit.title} [{hit.id}]"
        text = hit.text if len(hit.text) <= self.max_chars else hit.snippet[: self.max_chars] + " ..."
        return f"{name}: {' '.join(text.split())}"


class _CorpusReader:
    """A corpus that is read in threads, `AT_ONCE` at most."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._slots = anyio.CapacityLimiter(AT_ONCE)

    async def find(self, query: str, k: int) -> list[Hit]:
        async with self._slots:
            return await run_in_thread(partial(self.corpus.find, query, k))

    async def page(self, name: str) -> list[Passage]:
        async with self._slots:
            return await run_in_thread(partial(self.corpus.page, name))


def _split_pages(text: str) -> list[str]:
    """Split a text into parts of at most ``PAGE_CHARS`` characters, where a line or a word ends."""
    parts = []
    while len(text) > PAGE_CHARS:
        line, word = (text.rfind(end, PAGE_CHARS // 2, PAGE_CHARS) for end in ("\n", " "))
        end = line if line > 0 else word if word > 0 else PAGE_CHARS
        parts.append(text[:end])
        text = text[end:].lstrip()
    return [*parts, text]
