"""The seccomp filters of the commands in an episode's machine."""

from __future__ import annotations

from agentrl_tools.sandbox.filters import ALWAYS_REFUSED, OWN_LIMITS, build_unknown_filter, compile_filter


def build_shell_filters() -> list[bytes]:
    """Build the filters of commands: they may start processes, signal them, and set modes; no namespace, no mount."""
    named = compile_filter(f"{ALWAYS_REFUSED} {OWN_LIMITS}", own_limits=True, no_namespaces=True)
    return [build_unknown_filter(), named]  # in this order: the second refuses further filters
