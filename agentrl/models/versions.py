"""The window of versions: those of torch and transformers that agentrl is made for, as its package names them."""

from __future__ import annotations

import importlib.metadata
import warnings
from functools import cache

from packaging.requirements import Requirement

DISTRIBUTION, WATCHED = "agentrl-gym", ("torch", "transformers")


@cache
def warn_of_other_versions() -> None:
    """Warn, once, of an installed version that is outside of the window."""
    for name, window in find_windows().items():
        version = importlib.metadata.version(name)
        if sentence := describe_version(window, version):
            warnings.warn(sentence, stacklevel=3)


def find_windows() -> dict[str, Requirement]:
    """Find the windows in the package's own requirements; none where it is not installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    named = [Requirement(line) for line in lines]
    return {r.name: r for r in named if r.name in WATCHED and r.marker is None}


def describe_version(window: Requirement, version: str) -> str:
    """Describe an installed version that is outside of the window; nothing of one that is inside."""
    if window.specifier.contains(version, prereleases=True):
        return ""
    return (
        f"{window.name} {version} is installed; agentrl is made for {window.name} {window.specifier}, and may fail "
        f"with others: pip install '{window}' (docs/versions.md)"
    )
