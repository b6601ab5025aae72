"""Stop strings: texts that end a turn, though no token of the model's does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.types import Completion

_MORE = 8  # tokens before those that a string may be spread over: some decoders strip the first one's space


def cut_at_stop(text: str, strings: Sequence[str]) -> str:
    """Return the text before the first of the strings in it."""
    places = [at for at in (text.find(s) for s in strings) if at >= 0]
    return text[: min(places)] if places else text


@dataclass(frozen=True)
class StopStrings:
    """The strings that end a turn, and how its tokens are text."""

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str] = field(repr=False, compare=False)

    @property
    def window(self) -> int:
        """Return the number of tokens before the end of a turn that a string at its end may be spread over."""
        return max(len(s.encode()) for s in self.strings) + _MORE  # a token may be a single byte

    def is_completed(self, token_ids: Sequence[int], start: int = 0) -> bool:
        """Return True if the last token completes a string.

        Args:
            start: where the turn begins in the tokens; text before it counts for no string.
        """
        return self.is_contained(token_ids[max(start, len(token_ids) - self.window) :])

    def cut_completion(self, completion: Completion) -> Completion:
        """Return a turn up to the token that completes a string, of an engine that sampled more; or as it is."""
        ids = completion.token_ids
        if not self.is_contained(ids):
            return completion
        count = next((n for n in range(1, len(ids)) if self.is_completed(ids[:n])), len(ids))
        return completion.cut(count)

    def is_contained(self, token_ids: Sequence[int]) -> bool:
        """Return True if the text of some tokens has one of the strings in it."""
        text = self.decode(token_ids)
        return any(s in text for s in self.strings)
