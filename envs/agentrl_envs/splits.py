"""The train and test splits, told apart by the content of a task and not by its seed."""

from hashlib import blake2b
from typing import Literal

Split = Literal["train", "test"]


def assign_split(content: str) -> Split:
    """Return the split of a content: one eighth of all is test, for ever and for every seed."""
    return "test" if blake2b(content.encode(), digest_size=8).digest()[0] < 32 else "train"
