"""The tool search: what a model sees of a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agentrl_tools.bm25_index import build_corpus
from agentrl_tools.passages import Passage
from agentrl_tools.search import PAGE_CHARS, Search

from agentrl import ContractError, EnvSpec, ToolEnv, ToolError, UserError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation

LONG = "\n".join(f"Line {n} tells of the long thing." for n in range(200))
PASSAGES = [
    Passage("Ilm", "Ilm", "The Ilm is a river."),
    Passage("7", "Saale", "The Saale is a\nlonger river."),
    Passage("long", "Long", LONG),
]


class Reads(ToolEnv):
    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("read"), {}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build_corpus(PASSAGES, tmp_path / "c.db")
    return tmp_path / "c.db"


async def told(pattern: Search, *calls: str) -> list[str]:
    """What the tools say to calls of one turn, through a rollout."""

    class Equipped(Reads):
        tools = (pattern,)

    async with EnvSpec(Equipped).open() as spec:
        played = await Rollout(spec, ScriptedEngine(["".join(calls), "done"]), ByteRenderer()).episode(0)
    assert played.fault is None
    return [m["content"] for m in played.messages if m["role"] == "tool"]


async def test_results_are_numbered_with_title_id_and_text(path: Path) -> None:
    [found] = await told(Search(path), call("search", query="river"))
    assert sorted(line[3:] for line in found.splitlines()) == [
        "Ilm: The Ilm is a river.",
        "Saale [7]: The Saale is a longer river.",
    ]
    assert [line[:3] for line in found.splitlines()] == ["1. ", "2. "]


async def test_settings_bound_what_is_shown(path: Path) -> None:
    [one, long] = await told(Search(path, k=1, max_chars=20), *(call("search", query=q) for q in ("river", "thing")))
    assert len(one.splitlines()) == 1
    assert len(long) < 60


async def test_a_long_page_has_parts_that_make_up_the_whole(path: Path) -> None:
    async with Search(path).open() as shelf:
        tool = Search(path).start_episode(shelf).tool_list[1]
        first = await tool(title_or_id="long")
        count = int(first.rpartition(" of ")[2][:-1])
        parts = [await tool(title_or_id="long", page=n + 1) for n in range(count)]
        with pytest.raises(ToolError, match=f"page 'Long' has the parts 1 to {count}, not 99"):
            await tool(title_or_id="long", page=99)
    assert all(len(p) < PAGE_CHARS + 40 for p in parts)
    assert "\n".join(p.rpartition("\n(part")[0] for p in parts) == LONG


async def test_noes_tell_the_way_out(path: Path) -> None:
    calls = [
        call("search", query=""),
        call("search", query="?!"),
        call("open_page", title_or_id="river Ilm"),
    ]
    empty, wordless, page = await told(Search(path), *calls)
    assert empty == wordless == "error: the query has no words"
    assert page.startswith("error: there is no page 'river Ilm'; there is: Ilm, Saale")
    assert await told(Search(path), call("search", query="dragon")) == ["nothing found"]


async def test_a_corpus_may_be_made_of_passages_for_the_run() -> None:
    assert await told(Search(PASSAGES), call("open_page", title_or_id="7")) == ["The Saale is a\nlonger river."]


async def test_many_episodes_search_at_once(path: Path) -> None:
    class Equipped(Reads):
        tools = (Search(path),)

    async with EnvSpec(Equipped).open() as spec:
        script = [call("search", query="Ilm") * 3, "done"]
        groups = await Rollout(spec, ScriptedEngine(script), ByteRenderer()).batch(range(8), 4)
    found = [m["content"] for g in groups for t in g for m in t.messages if m["role"] == "tool"]
    assert len(found) == 96
    assert set(found) == {"1. Ilm: The Ilm is a river."}


async def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="k and max_chars are 1 or more, not 0 and 300"):
        Search(tmp_path / "c.db", k=0)
    with pytest.raises(UserError, match="agentrl index FILES --out"):
        await told(Search(tmp_path / "gone.db"), "x")
    with pytest.raises(ContractError, match=r"needs a name: search:INDEX"):
        EnvSpec(Reads).with_tools(["agentrl_tools.search:Search"])
