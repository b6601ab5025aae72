"""The engine's contract: token ids in, sampled token ids with their logprobs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.types import Completion, SamplingParams


class Engine(Protocol):
    """Samples from the policy. Any number of ``generate`` calls run at once; each may be cancelled."""

    @property
    def capacity(self) -> int:
        """How many sequences it samples at the same time; further ones wait inside."""
        ...

    @property
    def max_context(self) -> int:
        """The longest sequence (prompt and sampled tokens) it can hold."""
        ...

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Continue ``token_ids``. Calls of one ``session`` extend each other, so their cache may be kept."""
        ...

    def end_session(self, session: str) -> None:
        """The episode is over: what was kept for it may go."""
        ...

    async def update_weights(self, policy: Any, version: int) -> None:
        """From now on sample from ``policy``, and stamp tokens with ``version``."""
        ...

    async def close(self) -> None: ...
