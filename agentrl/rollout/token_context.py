"""The tokens of a context, grown in place: a turn costs what is new in it, however long the conversation is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import overload


class _Tokens:
    """Tokens that only ever grow, with what is known of all of them."""

    __slots__ = ("highest", "ids", "lowest", "text", "written")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.lowest, self.highest = 0, -1  # of no token
        self.text, self.written = bytearray(), 0  # of the first so many tokens, as JSON

    def extend(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        low, high = min(ids), max(ids)
        self.lowest, self.highest = (min(self.lowest, low), max(self.highest, high)) if self.ids else (low, high)
        self.ids.extend(ids)

    def write(self) -> None:
        """Write the tokens that were not written yet."""
        new = self.ids[self.written :]
        if new:
            self.text += b"," * bool(self.text) + ",".join(map(str, new)).encode()
            self.written += len(new)


class TokenContext(Sequence[int]):
    """The tokens that an engine goes on from: a sequence of token ids that stays as it is while others grow out of it.

    Contexts that grow out of each other hold the same memory. Nothing that one appends is seen in another: the first
    to append takes the memory on, and another one copies its own part before it appends.
    """

    __slots__ = ("_length", "_tokens")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._tokens, self._length = _Tokens(), 0
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Append tokens."""
        if self._length < len(self._tokens.ids):
            own, self._tokens = list(self), _Tokens()
            self._tokens.extend(own)
        self._tokens.extend(ids if isinstance(ids, (tuple, list)) else list(ids))
        self._length = len(self._tokens.ids)

    def take(self, length: int) -> TokenContext:
        """Return a context of the first so many tokens, or of all where it has fewer. No token is copied."""
        taken = TokenContext.__new__(TokenContext)
        taken._tokens, taken._length = self._tokens, min(length, self._length)
        return taken

    def copy(self) -> TokenContext:
        """Return a context of the same tokens, which goes on by itself."""
        return self.take(self._length)

    def extends(self, other: TokenContext) -> bool:
        """Return True if it grew out of the other, so that it begins with all of the other's tokens."""
        return self._tokens is other._tokens and self._length >= other._length

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the lowest and the highest token id; (0, -1) of none."""
        if self._length == len(self._tokens.ids):
            return self._tokens.lowest, self._tokens.highest
        return find_bounds(list(self))

    def to_json(self) -> bytes:
        """Write it as a JSON list. What was written before is not written again."""
        if self._length == len(self._tokens.ids):
            self._tokens.write()
            return b"[" + self._tokens.text + b"]"
        return ("[" + ",".join(map(str, self)) + "]").encode()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens.ids, self._length)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return self._tokens.ids[slice(*at.indices(self._length))] if _is_ordered(at) else list(self)[at]
        if not -self._length <= at < self._length:
            raise IndexError(f"token {at} of {self._length}")
        return self._tokens.ids[at + self._length if at < 0 else at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenContext) and other._tokens is self._tokens:
            return other._length == self._length
        return isinstance(other, Sequence) and len(other) == self._length and list(self) == list(other)

    def __repr__(self) -> str:
        return f"TokenContext({list(self)!r})"


def _is_ordered(at: slice) -> bool:
    return at.step is None or at.step > 0  # indices() of the others may be -1, which is another place


def find_bounds(token_ids: Sequence[int]) -> tuple[int, int]:
    """Return the lowest and the highest of some token ids; (0, -1) of none."""
    if isinstance(token_ids, TokenContext):
        return token_ids.bounds
    return (min(token_ids), max(token_ids)) if token_ids else (0, -1)


def write_json(token_ids: Sequence[int]) -> bytes:
    """Write token ids as a JSON list."""
    return (token_ids if isinstance(token_ids, TokenContext) else TokenContext(token_ids)).to_json()
