"""The plain way through a model: its own forward pass with its own cache, proven against the pass over a row alone.

What is tried, on the model's miniature and then on the model itself: the cache that the model makes, the one that
transformers makes for its settings, and one that grows by itself; with positions left to the model, or told as
``generate`` tells them. Then, whether the cache takes more than one token at a time (a session's next turn begins with
what is kept), and whether rows can be stacked, join and leave. Where no cache gives the model's own logits, each token
costs a pass over its whole row: slow, and right by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from agentrl.engines.embedded.kv_cache import SessionCache
from agentrl.engines.embedded.model_copy import ModelCopy
from agentrl.engines.embedded.own_cache import OwnCache, describe_cache, select_rows, stack_caches
from agentrl.engines.embedded.plain_batch import PlainBatch
from agentrl.models.capabilities import Capabilities, NotTestable
from agentrl.models.lm_head import NotProven
from agentrl.models.own_logits import accepts_argument, compute_next_logits
from agentrl.models.perturbation import NextLogits

CACHES = ("past_key_values", "cache_params", "state")  # what transformers' models call theirs

MakeCache = Callable[[PreTrainedConfig], object]
_STARTS: tuple[MakeCache | None, ...] = (None, lambda config: DynamicCache(config=config), lambda _: DynamicCache())


@dataclass(frozen=True)
class CacheWay:
    """A way to call a model with a cache of its own."""

    make_cache: MakeCache | None  # what the first call is given; None: the model makes one
    tells_positions: bool  # some models lose count of what their cache holds
    extends: bool = False  # more than one token can be added at a time
    stacks: bool = False  # rows at the same position can share a call

    @property
    def cost(self) -> str:
        """Say how rows go, for a sentence."""
        how = "rows at the same position side by side" if self.stacks else "one row after the other"
        again = "" if self.extends else ", and its history again at each turn"
        return f"with the model's own cache, {how}{again}"


class PlainModel(ModelCopy):
    """A model that is called as it is. ``way`` is None where no cache gives the model's own logits.

    Args:
        model: its parameters are shared, unless it is to be a ``snapshot``.
        dtype: of a copy of the weights; by default they are used as they are.

    Raises:
        NotProven: the model gives no logits, or other ones each time, or is an encoder.
    """

    fused = None  # no pass of the engine's own

    def __init__(self, model: PreTrainedModel, *, snapshot: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, snapshot=snapshot)
        self.way: CacheWay | None = None
        self._choose_way(Capabilities(self.model))
        if dtype is not None:
            self.cast(dtype)

    def _choose_way(self, proofs: Capabilities) -> None:
        try:
            proofs.prove_repeatable()
        except NotTestable:  # nothing is known of its cache beyond its windows
            self.is_causal = True
            return
        self.is_causal = proofs.holds(proofs.prove_causal_alone)
        if not self.is_causal:
            proofs.prove_decoder()
        self.way = _find_way(proofs) if self.is_causal else None

    @property
    def stacks(self) -> bool:
        """Return True if rows share calls."""
        return self.way is not None and self.way.stacks

    @property
    def cost(self) -> str:
        """Say what it costs, for a sentence."""
        return self.way.cost if self.way is not None else "without a cache: each token costs a pass over its whole row"

    def new_batch(self, capacity: int, prefill_tokens: int, keep_bytes: int) -> PlainBatch:
        """Make an empty batch."""
        return PlainBatch(self, SessionCache(keep_bytes), capacity, prefill_tokens)

    def run(self, rows: Sequence[list[int]], new: int, cache: OwnCache | None) -> tuple[Tensor, OwnCache | None]:
        """Run the last ``new`` tokens of each row; the logits behind them, (rows, vocabulary), and the cache."""
        if self.way is not None:
            return _run_cached(self.model, self.way, rows, new, cache)
        if self.is_causal:
            return torch.cat([_run(self.model, [row], {"use_cache": False}).logits[:, -1] for row in rows]), None
        return torch.stack([compute_next_logits(self.model, row) for row in rows]), None


def _run_cached(
    model: PreTrainedModel, way: CacheWay, rows: Sequence[list[int]], new: int, cache: OwnCache | None
) -> tuple[Tensor, OwnCache]:
    """Run the last ``new`` tokens of each row, whose cache holds those before them; logits and cache.

    Raises:
        NotProven: the model returns no cache.
    """
    if cache is None:
        cache = {} if way.make_cache is None else {CACHES[0]: way.make_cache(model.config)}
    arguments = {"use_cache": True, **cache}
    if way.tells_positions:
        arguments["position_ids"] = _count_positions(model, rows)[:, -new:]
    output = _run(model, [row[-new:] for row in rows], arguments)
    returned = {name: held for name in CACHES if (held := getattr(output, name, None)) is not None} or cache
    if not returned:
        raise NotProven("it returns no cache")
    return output.logits[:, -1], returned


def _run(model: PreTrainedModel, rows: Sequence[list[int]], arguments: dict[str, Any]) -> Any:
    """Call the model on rows of one length; it computes no more logits than the last, if it can."""
    ids = torch.tensor(rows, device=model.get_input_embeddings().weight.device)
    last = {"logits_to_keep": 1} if accepts_argument(model, "logits_to_keep") else {}
    return model(input_ids=ids, **last, **arguments)


def _count_positions(model: PreTrainedModel, rows: Sequence[list[int]]) -> Tensor:
    """Count positions from 0, or by the model's own rule, as RoBERTa's: padding has none. (rows, tokens)."""
    ids = torch.tensor(rows, device=model.get_input_embeddings().weight.device)
    for module in model.modules():
        if (rule := getattr(module, "create_position_ids_from_input_ids", None)) is not None:
            positions: Tensor = rule(ids, module.padding_idx)
            return positions
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def _find_way(proofs: Capabilities) -> CacheWay | None:
    """Find the way to call a model with a cache that gives its own logits. None: there is no such way."""
    for tells_positions, make_cache in product((False, True), _STARTS):
        way = CacheWay(make_cache, tells_positions)
        if not proofs.gives_own_logits(partial(_run_one_row, way=way)):
            continue
        if proofs.gives_own_logits(partial(_run_two_turns, way=way)):
            way = replace(way, extends=True)
        if proofs.gives_own_logits(partial(_run_stacked, way=way)):
            way = replace(way, stacks=True)
        return way
    return None


def _run_one_row(model: PreTrainedModel, rows: list[list[int]], way: CacheWay) -> NextLogits:
    """Run two prompts, then single tokens of both in turn: what is kept stands in the caches, not in the modules."""
    caches: dict[int, OwnCache] = {}
    start = len(rows[0]) - 10
    for step in range(10):
        for row in (0, 1):
            new = start if step == 0 else 1
            logits, caches[row] = _run_cached(model, way, [rows[row][: start + step]], new, caches.get(row))
            yield row, start + step, logits[0]


def _run_two_turns(model: PreTrainedModel, rows: list[list[int]], way: CacheWay) -> NextLogits:
    """Run a prompt, a token, more tokens at once, and single tokens again; copied on the way."""
    row, cache, before = rows[0], None, 0
    for end in (17, 18, 37, 38, 39, 41, 42):
        logits, cache = _run_cached(model, way, [row[:end]], end - before, cache)
        yield 0, end, logits[0]
        cache, before = select_rows(cache, [0]), end


def _run_stacked(model: PreTrainedModel, rows: list[list[int]], way: CacheWay) -> NextLogits:
    """Run two rows together; a third joins, the second leaves, the others change places."""
    at = len(rows[0]) - 10
    state: OwnCache = {}

    def run(members: list[int], end: int, cache: OwnCache | None) -> Iterator[tuple[int, int, Tensor]]:
        new = end if cache is None else 1
        logits, held = _run_cached(model, way, [rows[m][:end] for m in members], new, cache)
        state.clear()
        state.update(held)
        yield from ((member, end, own) for member, own in zip(members, logits, strict=True))

    yield from run([0, 1], at, None)
    yield from run([0, 1], at + 1, dict(state))
    pair = dict(state)
    yield from run([2], at + 1, None)
    if describe_cache(pair) != describe_cache(state):
        raise NotProven("its caches differ between rows at the same position")
    yield from run([0, 1, 2], at + 2, stack_caches([pair, state]))
    kept = select_rows(state, [2, 0])
    for end in (at + 3, at + 4, at + 5):
        yield from run([2, 0], end, kept)
        kept = dict(state)
