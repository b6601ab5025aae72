"""Seeds of turns and episodes, mixed from the numbers that tell them apart."""

from __future__ import annotations

import hashlib


def mix_seeds(*numbers: int) -> int:
    """Mix several numbers into one 63-bit seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
