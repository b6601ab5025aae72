"""The experts that the routers of the embedded engine's model choose, of each token of a row, as tokens pass."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.models.routers import find_routers, refuse_replay
from agentrl.rollout.routed_experts import pack_experts
from agentrl.types import RoutedExperts

Experts = NDArray[np.uint8] | NDArray[np.uint16]  # (tokens, layers, top_k)


class RouterRecorder:
    """Records what the routers of a model choose, pass by pass. The model is the engine's own copy of the modules.

    Raises:
        UserError: it has no routers, or none that can be followed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        with refuse_replay(f"the experts of {type(model).__name__} cannot be recorded"):
            self.routers = find_routers(model)
        self._chosen: dict[int, Tensor] = {}
        self._choosing = self.routers.choose(model, self._note)
        self._choosing.__enter__()  # as long as the model is sampled from

    def _note(self, router_index: int, scores: Tensor, own: Tensor) -> Tensor:
        self._chosen[router_index] = own
        return own

    def new_log(self) -> RouterLog:
        """Make an empty log of a row."""
        return RouterLog(self._narrow(torch.empty(0, len(self.routers.names), self.routers.top_k)))

    def take(self) -> Experts:
        """Return the experts of the last pass's tokens."""
        chosen = torch.stack([self._chosen[index] for index in range(len(self.routers.names))], 1)
        self._chosen.clear()
        return self._narrow(chosen)

    def _narrow(self, chosen: Tensor) -> Experts:
        """Convert numbers of experts to as few bits as hold them all."""
        if self.routers.experts <= 256:
            return chosen.to(torch.uint8).cpu().numpy()
        return chosen.to(torch.int32).cpu().numpy().astype(np.uint16)


class RouterLog:
    """The experts of a row's tokens, from the first one on.

    Where the weights change while a row is sampled, all of it passes the model again, by other experts. Said is what
    each token's experts were first, as those behind it were sampled with these; shared with rows that begin alike is
    what goes with the keys and values that are there now.
    """

    def __init__(self, empty: Experts) -> None:
        self._first, self._now, self._length = empty, empty, 0

    def __len__(self) -> int:
        """Count the tokens whose keys and values are there now."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Count the bytes of what is there now."""
        return self._now.nbytes

    def begin(self, source: RouterLog | None, length: int) -> None:
        """Begin with so many tokens of another row, or with none."""
        self._length = 0
        if source is not None and length:
            self.append(source._now[: min(length, source._length)])

    def append(self, experts: Experts) -> None:
        """Append those of tokens that have just passed."""
        end = self._length + len(experts)
        if end > len(self._now):
            grown = np.empty((max(end, 2 * len(self._now)), *self._now.shape[1:]), self._now.dtype)
            grown[: self._length] = self._now[: self._length]
            self._now = grown
        self._now[self._length : end] = experts
        self._length = end

    def restart(self) -> None:
        """Note that all tokens will pass again."""
        self._first = np.concatenate([self._first, self._now[len(self._first) : self._length]])
        self._now, self._length = self._now[:0], 0

    def read(self, start: int, stop: int) -> RoutedExperts:
        """Return what is said of the tokens from ``start`` to before ``stop``."""
        earlier = len(self._first)
        now = self._now[: self._length]
        experts = np.concatenate([self._first[start:stop], now[max(start, earlier) : max(stop, earlier)]])
        return pack_experts(experts)
