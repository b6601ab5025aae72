"""The history of a conversation: what was sampled stays in the context, or the template writes it anew.

Many templates drop the thoughts of earlier turns once another turn comes. ``as_sampled``: they stay, and an episode is
one context, to which turns are appended. ``as_template``: the conversation is rendered anew, and where that says
otherwise than the context does, the episode goes on in another context, which begins with it.
"""

from __future__ import annotations

from typing import NamedTuple


class NewContext(NamedTuple):
    """The tokens that another context begins with: the history, and behind it what is new.

    ``observation`` is empty, and all is in ``history``, where they are not the ones that would be appended.
    """

    history: list[int]
    observation: list[int]

    @classmethod
    def split(cls, token_ids: list[int], appended: list[int]) -> NewContext:
        """Split a rendering at the tokens that would be appended, where it ends with them."""
        at = len(token_ids) - len(appended)
        return cls(token_ids[:at], appended) if token_ids[at:] == appended else cls(token_ids, [])


def say_alike(one: str, other: str) -> bool:
    """Return True if two texts are the same, white space aside: models and templates do not agree about that."""
    return "".join(one.split()) == "".join(other.split())
