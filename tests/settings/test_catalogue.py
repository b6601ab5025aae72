"""The catalogue of losses, advantages ...: what the pages and the help say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.settings.catalogue import CHOICES, list_own_entries

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["loss", "advantage", "optimizer"])
def test_the_page_on_algorithms_has_all_of_them(kind: Any) -> None:
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    assert [name for name, _ in list_own_entries(kind) if f"`{name}`" not in page] == []


def test_each_is_explained_and_each_parameter_described() -> None:
    for choice in CHOICES:
        for name, entry in list_own_entries(choice.kind):
            assert entry.explain, name
            assert entry.summary, name
            assert [n for n, field in entry.parameters.items() if not field.description] == [], name


def test_a_kind_is_listed_with_what_plugins_add(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "losses"]) == 0
    listed = capsys.readouterr().out
    assert [name for name, _ in list_own_entries("loss") if name not in listed] == []
    assert main(["list", "cispo"]) == 0
    described = capsys.readouterr().out
    assert "--learner.loss_args.epsilon_high" in described
    assert "[5.0]" in described
    assert "cispo_clip_ratio" in described
    assert main(["list", str(ROOT / "tests/desk/my_losses.py:mine")]) == 0
    assert "--learner.loss_args.tau  where the weight of a token levels off. [0.5]" in capsys.readouterr().out
    assert main(["list", "hermes"]) == 0  # a call format has no settings
    assert "call format hermes: Read and write JSON" in capsys.readouterr().out
    assert main(["list", "loses"]) == 2
    assert "did you mean 'losses'?" in capsys.readouterr().err
