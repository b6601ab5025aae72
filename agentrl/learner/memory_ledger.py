"""A ledger of memory: the bytes of the tensors that live, and the most that lived at once.

It counts storages as operations make them and as the last reader lets go of them, of real tensors and of fake ones. So
a step of a model that fits no machine here can be gone through, and its bytes read off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes while it is entered.

    live      bytes of the tensors that are there
    peak      the most that ``live`` has been
    peak_op   the operation that took it there
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Begin with the tensors that are there already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.peak_op = ""
        self._counted: set[int] = set()
        for tensor in known:
            self._add(tensor, "")

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf, str(func))
        return out

    def _add(self, tensor: Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one object for a storage as long as that lives
        if key in self._counted:
            return
        size = storage.nbytes()
        self._counted.add(key)
        weakref.finalize(storage, self._drop, key, size)
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_op = self.live, op

    def _drop(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size

    def restart_peak(self) -> None:
        """Forget the peak: from here on it is what lives now."""
        self.peak, self.peak_op = self.live, ""
