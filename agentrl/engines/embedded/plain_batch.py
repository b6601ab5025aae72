"""The batch of the plain way: rows in stacks, each stack with one cache of the model's own class.

Rows whose caches have the same shape, at the same position, are one stack, and one call of the model: the samples of a
group go together from their prompt on. A stack is copied only when rows join or leave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from agentrl.engines.embedded.batch import Request, begin_log, record_experts, restart_logs
from agentrl.engines.embedded.kv_cache import SessionCache
from agentrl.engines.embedded.own_cache import OwnCache, count_bytes, describe_cache, select_rows, stack_caches

if TYPE_CHECKING:
    from agentrl.engines.embedded.plain_view import PlainModel
    from agentrl.engines.embedded.router_log import RouterLog, RouterRecorder
    from agentrl.rollout.engine_protocol import Meter


@dataclass
class _Stack:
    """Rows that go through the model together; each brings as many tokens."""

    rows: list[Request]
    cache: OwnCache | None  # None: nothing is computed yet, or nothing is kept

    def split(self, rows_each: int) -> Iterator[_Stack]:
        """Cut into stacks of so many rows; only of one that has no cache yet."""
        for start in range(0, len(self.rows), rows_each):
            yield _Stack(self.rows[start : start + rows_each], None)


class _KeptCache(NamedTuple):
    """The cache of a session, and the experts that its tokens went to."""

    cache: OwnCache
    routed: RouterLog | None


@dataclass
class PlainBatch:
    """A `RowBatch` whose rows are computed by the model itself, with its own cache."""

    model: PlainModel
    sessions: SessionCache[_KeptCache]
    capacity: int
    prefill_tokens: int
    waiting: deque[Request] = field(default_factory=deque)
    recorder: RouterRecorder | None = None
    _stacks: list[_Stack] = field(default_factory=list)

    @property
    def rows(self) -> list[Request]:
        return [row for stack in self._stacks for row in stack.rows]

    def remove_finished(self) -> bool:
        finished = False
        for stack in self._stacks:
            staying = [i for i, row in enumerate(stack.rows) if not row.is_done]
            if len(staying) == len(stack.rows):
                continue
            for i, row in enumerate(stack.rows):
                if row.stop_reason is not None and not row.cancelled:
                    finished = True
                    self._keep(row, i, stack.cache)
            stack.rows = [stack.rows[i] for i in staying]
            if stack.cache is not None and staying:
                stack.cache = select_rows(stack.cache, staying)
        self._stacks = [stack for stack in self._stacks if stack.rows]
        return finished

    def _keep(self, row: Request, index: int, cache: OwnCache | None) -> None:
        """Keep a row's cache for the session's next turn, if that can begin with it."""
        if cache is not None and self.model.way is not None and self.model.way.extends:
            own = select_rows(cache, [index])
            size = count_bytes(own) + (row.routed.nbytes if row.routed is not None else 0)
            self.sessions.put(row.session, row.ids[: row.cached], _KeptCache(own, row.routed), size)

    def admit_waiting(self) -> int:
        joining: list[Request] = []
        computed = 0
        self._merge()
        free = self.capacity - len(self.rows)
        while self.waiting and len(joining) < free and (not joining or computed < self.prefill_tokens):
            row = self.waiting.popleft()
            if not row.is_done:
                joining.append(row)
                computed += len(row.ids)
        return self._add_rows(joining)

    def _add_rows(self, joining: list[Request]) -> int:
        """Add rows, in stacks of those that bring as many tokens; return how many of theirs are kept already."""
        fresh: dict[int, list[Request]] = {}
        reused = 0
        for row in joining:
            row.cached = 0
            kept = self.sessions.get(row.session)
            if kept is not None and len(kept[0]) < len(row.ids) and row.ids[: len(kept[0])] == kept[0]:
                row.cached = len(kept[0])
                reused += row.cached
                begin_log(self.recorder, row, kept[1].routed)
                self._stacks.append(_Stack([row], select_rows(kept[1].cache, [0])))
            else:
                begin_log(self.recorder, row, None)
                fresh.setdefault(len(row.ids), []).append(row)
        for length, rows in fresh.items():
            together = max(1, self.prefill_tokens // length) if self.model.stacks else 1
            self._stacks += _Stack(rows, None).split(together)
        return reused

    def _merge(self) -> None:
        """Make one stack of those whose caches have the same shape, and whose rows bring as many tokens."""
        if not self.model.stacks:
            return
        alike: dict[object, list[_Stack]] = {}
        for stack in self._stacks:
            new = stack.rows[0].uncached
            key = id(stack) if stack.cache is None else (new, describe_cache(stack.cache))
            alike.setdefault(key, []).append(stack)
        if len(alike) < len(self._stacks):
            self._stacks = [stacks[0] if len(stacks) == 1 else _join(stacks) for stacks in alike.values()]

    def compute_logits(self, meter: Meter) -> Tensor:
        return torch.cat([self._run_stack(stack, meter) for stack in self._stacks])

    def _run_stack(self, stack: _Stack, meter: Meter) -> Tensor:
        """Run a stack's new tokens; the logits that continue its rows, (rows, vocabulary)."""
        rows = stack.rows
        if stack.cache is not None:
            logits, stack.cache = self.model.run([r.ids for r in rows], rows[0].uncached, stack.cache)
            computed = rows[0].uncached * len(rows)
            if self.recorder is not None:
                record_experts(self.recorder, rows, [rows[0].uncached] * len(rows))
        else:  # rows that are alike are computed once
            alike = list({tuple(row.ids): row.ids for row in rows}.values())
            index = {tuple(ids): i for i, ids in enumerate(alike)}
            source = [index[tuple(row.ids)] for row in rows]
            logits, cache = self.model.run(alike, len(alike[0]), None)
            computed = len(alike[0]) * len(alike)
            self._record_alike(rows, source, len(alike[0]))
            if len(alike) < len(rows):
                logits, cache = logits[source], None if cache is None else select_rows(cache, source)
            stack.cache = cache
        meter.passes += 1
        meter.prefilled += computed if computed > len(rows) else 0
        return logits

    def _record_alike(self, rows: Sequence[Request], source: Sequence[int], length: int) -> None:
        """Append the experts of whole rows to their logs; those that are alike were computed once."""
        if self.recorder is not None:
            experts = self.recorder.take()
            for row, index in zip(rows, source, strict=True):
                assert row.routed is not None
                row.routed.append(experts[index * length : (index + 1) * length])

    def restart(self) -> None:
        self.clear_sessions()
        restart_logs(self.rows)
        self.waiting.extendleft(reversed(self.rows))
        self._stacks.clear()

    def release(self) -> None:
        self.restart()

    def end_session(self, session: str) -> None:
        self.sessions.remove(session)

    def clear_sessions(self) -> None:
        self.sessions.clear()


def _join(stacks: list[_Stack]) -> _Stack:
    caches = [stack.cache for stack in stacks if stack.cache is not None]
    return _Stack([row for stack in stacks for row in stack.rows], stack_caches(caches))
