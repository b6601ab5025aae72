"""The call formats by name: each is declared with `agentrl.call_format`, which makes it a value of ``call_format``."""

from __future__ import annotations

from agentrl.errors import ContractError
from agentrl.renderer.call_formats import NEEDS, CallFormat
from agentrl.renderer.call_formats import hermes as _hermes
from agentrl.settings.catalogue import bind_entry
from agentrl.settings.entries import call_format


@call_format(explain="learnt from the model's own chat template")
def auto() -> None:
    """Learn the format from what the chat template writes; Hermes where it has no calls."""


@call_format(explain="JSON between <tool_call> tags")
def hermes() -> CallFormat:
    """Read and write JSON between <tool_call> tags, which Qwen and many others were trained on."""
    return _hermes


def build_call_format(name: str) -> CallFormat | None:
    """Build the call format of a name: a registered one, ``module:function`` or ``file.py:Class``.

    ``auto`` gives None: a renderer learns its template's own.

    Raises:
        UserError: there is none, or it is no call format.
    """
    bound = bind_entry("call_format", name)
    built: CallFormat | None = bound.call_safely()
    if built is None and name == "auto":
        return None
    if missing := [need for need in NEEDS if not hasattr(built, need)]:
        raise ContractError(f"{bound.what} is {built!r:.80}, which has no {missing[0]}")
    return built
