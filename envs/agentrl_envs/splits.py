"""Train and test, told apart by what a task says and not by its seed."""

from hashlib import blake2b
from typing import Literal

Split = Literal["train", "test"]


def split_of(content: str) -> Split:
    """One eighth of all contents is test, for ever and for every seed."""
    return "test" if blake2b(content.encode(), digest_size=8).digest()[0] < 32 else "train"
