"""The window of versions: what is installed is inside of it, and what is not is told."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from agentrl.models import policy, versions

WINDOW = Requirement("transformers>=5.16.1,<5.24")


@pytest.mark.parametrize("version", ["5.16.1", "5.19.0", "5.23.4"])
def test_a_version_inside_is_not_spoken_of(version: str) -> None:
    assert versions.describe_version(WINDOW, version) == ""


def test_a_build_for_the_cpu_is_its_version() -> None:
    assert versions.describe_version(Requirement("torch>=2.11,<2.15"), "2.13.0+cpu") == ""


@pytest.mark.parametrize("version", ["5.16.0", "5.24.0"])
def test_a_version_outside_is_told_with_what_to_install(version: str) -> None:
    told = versions.describe_version(WINDOW, version)
    assert told.startswith(f"transformers {version} is installed; agentrl is made for transformers <5.24,>=5.16.1")
    assert "pip install 'transformers<5.24,>=5.16.1'" in told


def test_loading_a_model_tells_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(versions.find_windows()) == {"torch", "transformers"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "5.99.0" if n == "transformers" else real(n))
    versions.warn_of_other_versions.cache_clear()
    with pytest.warns(UserWarning, match=r"transformers 5\.99\.0 is installed; agentrl is made for"):
        policy.load_policy("nano")  # a second warning would be an error
    policy.load_policy("nano")
