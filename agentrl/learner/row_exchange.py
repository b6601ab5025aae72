"""The rows of a batch on their way from rank 0 to the processes that learn from them.

Rank 0 has all the rows, and has planned the micro-batches of every optimizer step. Each process receives the rows of
its own ones, and no others, as flat arrays, those of a row behind those of the row before:

updates       (micro-batches,) int32    the optimizer step of each
rows          (micro-batches,) int32    how many rows it has
tokens        (rows,) int32             how many tokens a row has
contexts      (rows,) int32             and how many contexts
weights       (rows,) float64           of its trained tokens in the loss
starts        (contexts,) int32         the place in the row at which a context begins
token_ids     (tokens,) int32
loss_mask     (tokens,) bool            the trained tokens
logprobs      (trained,) float32        the engine's; nan where none sampled the token
advantages    (trained,) float32
has_kept      (trained,) bool           the token was drawn among a set; it is empty where none was
kept_words    (words,) int32            the sets of those, as `agentrl.types.KeptTokens` has them
kept_ends     (sets,) int32
kept_numbers  (tokens with a set,) int32
has_experts   (tokens,) bool            an engine said the experts of the token; it is empty where it said none
experts       (bytes,) uint8            the experts of those tokens, (layers, top_k) of each
experts_shape (3,) int32                layers, top_k, bytes of an expert; it is empty where none was said

Before the arrays comes the length of each, int64. What is made of rows, such as the forest of their prefixes, every
process makes itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.packing import MicroBatch
from agentrl.learner.replayed_experts import ReplayedExperts
from agentrl.learner.row_arrays import Bool, Float32, Int32, RowArrays
from agentrl.types import KeptTokens

_DTYPES = (  # of the arrays, in order
    *(torch.int32, torch.int32, torch.int32, torch.int32, torch.float64, torch.int32, torch.int32),
    *(torch.bool, torch.float32, torch.float32, torch.bool, torch.int32, torch.int32, torch.int32),
    *(torch.bool, torch.uint8, torch.int32),
)


@dataclass(frozen=True, eq=False)
class RowShare:
    """The rows of a process's micro-batches. The arrays are described at the top of this file."""

    updates: Int32
    rows: Int32
    tokens: Int32
    contexts: Int32
    weights: NDArray[np.float64]
    starts: Int32
    token_ids: Int32
    loss_mask: Bool
    logprobs: Float32
    advantages: Float32
    has_kept: Bool
    kept_words: Int32
    kept_ends: Int32
    kept_numbers: Int32
    has_experts: Bool
    experts: NDArray[np.uint8]
    experts_shape: Int32

    @classmethod
    def collect(cls, updates: Sequence[Sequence[MicroBatch]]) -> RowShare:
        """Make it of the micro-batches of each optimizer step."""
        batches = [batch for own in updates for batch in own]
        rows = [row for batch in batches for row in batch.rows]
        sets = [one for batch in batches for one in batch.kept] if any(row.kept for row in rows) else []
        kept = KeptTokens.collect(one.tobytes() for one in sets if one is not None)
        words, ends, numbers = (np.array(values, np.int32) for values in (kept.words, kept.ends, kept.numbers))
        return cls(
            _collect(number for number, own in enumerate(updates) for _ in own),
            _collect(len(batch.rows) for batch in batches),
            _collect(len(row.token_ids) for row in rows),
            _collect(len(row.starts) for row in rows),
            np.array([weight for batch in batches for weight in batch.row_weights], np.float64),
            _collect(start for row in rows for start in row.starts),
            np.concatenate([np.empty(0, np.int32), *(row.token_ids for row in rows)]),
            np.concatenate([np.empty(0, np.bool_), *(row.loss_mask for row in rows)]),
            np.concatenate([np.empty(0, np.float32), *(row.logprobs for row in rows)]),
            np.concatenate([np.empty(0, np.float32), *(row.advantages for row in rows)]),
            np.array([one is not None for one in sets], np.bool_),
            *(words, ends, numbers),
            *_collect_experts(rows),
        )

    def batches(self, updates: int) -> list[list[MicroBatch]]:
        """Make the micro-batches of each of so many optimizer steps again; their rows are views of these arrays."""
        rows, weights = self._list_rows(), iter(self.weights.tolist())
        batches: list[list[MicroBatch]] = [[] for _ in range(updates)]
        for update, count in zip(self.updates.tolist(), self.rows.tolist(), strict=True):
            own = [(next(rows), next(weights)) for _ in range(count)]
            batches[update].append(MicroBatch([row for row, _ in own], [weight for _, weight in own]))
        return batches

    def _list_rows(self) -> Iterator[RowArrays]:
        words, ends, numbers = (array("i", a.tobytes()) for a in (self.kept_words, self.kept_ends, self.kept_numbers))
        drawn = iter(KeptTokens(words, ends, numbers).sets())
        experts = self._list_experts()
        first = first_start = first_trained = 0
        for count, contexts in zip(self.tokens.tolist(), self.contexts.tolist(), strict=True):
            own, starts = slice(first, first + count), slice(first_start, first_start + contexts)
            mask = self.loss_mask[own]
            trained = slice(first_trained, first_trained + int(mask.sum()))
            has_kept = self.has_kept[trained]
            kept = [next(drawn) if has else None for has in has_kept.tolist()] if has_kept.any() else ()
            columns = self.logprobs[trained], self.advantages[trained]
            places = tuple(self.starts[starts].tolist())
            yield RowArrays(self.token_ids[own], mask, *columns, kept, places, next(experts))
            first, first_start, first_trained = own.stop, starts.stop, trained.stop

    def _list_experts(self) -> Iterator[ReplayedExperts | None]:
        """Yield the experts of each row; None of one without."""
        if not len(self.experts_shape):
            yield from [None] * len(self.tokens)
            return
        layers, top_k, width = self.experts_shape.tolist()
        chosen = self.experts.view(f"u{width}").reshape(-1, layers, top_k)
        first = first_known = 0
        for count in self.tokens.tolist():
            known = self.has_experts[first : first + count]
            end = first_known + int(known.sum())
            yield ReplayedExperts(known, chosen[first_known:end]) if end > first_known else None
            first, first_known = first + count, end


def scatter_rows(process_group: ProcessGroup, updates: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
    """Send each other process the rows of its micro-batches, from rank 0; return this process's, as they are.

    Args:
        updates: of each optimizer step all micro-batches, which are dealt in turn.
    """
    for rank in range(1, process_group.world_size):
        share = RowShare.collect([process_group.shard(batches, rank) for batches in updates])
        columns = [torch.from_numpy(values) for values in vars(share).values()]
        process_group.send([torch.tensor([len(column) for column in columns]), *columns], rank)
    return [list(process_group.shard(batches)) for batches in updates]


def receive_rows(process_group: ProcessGroup, updates: int) -> list[list[MicroBatch]]:
    """Receive what rank 0 scatters: this process's micro-batches of each of so many optimizer steps."""
    lengths = torch.zeros(len(_DTYPES), dtype=torch.int64)
    process_group.receive_from(0, [lengths])
    columns = [torch.empty(n, dtype=dtype) for n, dtype in zip(lengths.tolist(), _DTYPES, strict=True)]
    process_group.receive_from(0, columns)
    return RowShare(*(column.numpy() for column in columns)).batches(updates)


def _collect_experts(rows: Sequence[RowArrays]) -> tuple[Bool, NDArray[np.uint8], Int32]:
    """Collect the experts of rows: of which tokens they are, their bytes, their shape."""
    said = [row.experts for row in rows if row.experts is not None]
    if not said:
        return np.empty(0, np.bool_), np.empty(0, np.uint8), np.empty(0, np.int32)
    known = [np.zeros(len(row.token_ids), np.bool_) if row.experts is None else row.experts.known for row in rows]
    chosen = np.concatenate([experts.chosen for experts in said])
    shape = np.array([*chosen.shape[1:], chosen.itemsize], np.int32)
    return np.concatenate(known), chosen.reshape(-1).view(np.uint8), shape


def _collect(values: Iterable[int]) -> Int32:
    return np.fromiter(values, np.int32)
