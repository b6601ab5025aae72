"""Kept tokens and the penalty of repeated ones: the changes of logits in sampling that the learner makes again.

A set of kept tokens is a row of a mask, (rows, vocabulary), or numbers as `agentrl.types.KeptTokens` has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.models.device_copy import copy_to_device

_BITS = -1  # the first number of a set that is bits: no token has that id


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Make the tokens of the context less likely, as transformers and vLLM do.

    Args:
        logits: (rows, vocabulary), before temperature.
        seen: (rows, vocabulary), True for the tokens of the row's context.
        penalty: over 1 against repetition; one number, or (rows, 1).
    """
    return logits * find_penalties(logits, seen, penalty)


def find_penalties(logits: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Find the factor of each logit that makes the tokens of the context less likely: constants, by its sign."""
    if not isinstance(penalty, Tensor):
        penalty = logits.new_full((), penalty)
    weight = penalty.to(logits.dtype)
    return torch.where(seen, torch.where(logits.detach() < 0, weight, 1 / weight), 1.0)


def encode_kept(kept: Tensor) -> list[bytes]:
    """Return each row's set as the bytes of 32-bit integers: its ids, or its bits where these are fewer."""
    vocabulary = kept.shape[1]
    counts = kept.sum(1)
    many = counts * 32 > vocabulary
    ids = kept[~many].nonzero()[:, 1].to(torch.int32).cpu().numpy().tobytes()
    bits = iter(_pack_bits(kept[many].cpu().numpy()))
    sets, start = [], 0
    for count, is_bits in zip(counts.tolist(), many.tolist(), strict=True):
        end = start if is_bits else start + 4 * count
        sets.append(next(bits) if is_bits else ids[start:end])
        start = end
    return sets


def _pack_bits(kept: np.ndarray) -> list[bytes]:
    padded = np.pad(kept, ((0, 0), (0, -kept.shape[1] % 32)))
    lead = np.full((len(kept), 1), _BITS, dtype="<i4")
    words = np.packbits(padded, axis=1, bitorder="little").view("<i4")
    return [row.tobytes() for row in np.concatenate([lead, words], axis=1)]


def decode_kept(sets: Sequence[array[int] | None], vocabulary: int, device: torch.device) -> Tensor:
    """Return the mask of the sets, (rows, vocabulary); None keeps all."""
    kept = torch.zeros(len(sets), vocabulary, dtype=torch.bool, device=device)
    rows: list[int] = []
    listed: list[array[int]] = []
    bits: dict[int, list[int]] = {}  # rows by the identity of their set
    for row, one in enumerate(sets):
        if one is None:
            kept[row] = True
        elif len(one) and one[0] == _BITS:
            bits.setdefault(id(one), []).append(row)
        else:
            rows.append(row)
            listed.append(one)
    if listed:
        lengths = torch.tensor([len(one) for one in listed])
        flat = torch.from_numpy(np.concatenate([np.frombuffer(one, dtype=np.int32) for one in listed])).long()
        where = torch.tensor(rows).repeat_interleave(lengths)
        kept[copy_to_device(where, device), copy_to_device(flat, device)] = True
    for same in bits.values():
        one = sets[same[0]]
        assert one is not None
        unpacked = np.unpackbits(np.frombuffer(one, dtype="<u4")[1:].view(np.uint8), bitorder="little")[:vocabulary]
        kept[copy_to_device(torch.tensor(same), device)] = copy_to_device(torch.from_numpy(unpacked).bool(), device)
    return kept
