"""A lint of what would make a GPU wait, run on the CPU: every place where Python needs a value before it can go on.

On a GPU the host runs ahead and queues work. It has to wait where it reads a number (``float``, ``.item()``, ``if``
of a tensor), where a shape depends on values (a boolean index, ``nonzero``), and where it copies from memory that is
not pinned. All of these are seen here, of tensors on the CPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import agentrl

SOURCES = str(Path(agentrl.__file__).parent)
READS = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default"}
SHAPES = {
    *("aten.nonzero.default", "aten.masked_select.default", "aten.unique_dim.default", "aten._unique2.default"),
    *("aten.unique_consecutive.default", "aten.bincount.default"),
}
INDEXING = {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default"}
COPIES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.new_tensor, torch.Tensor.tolist}
MAKES = {torch.tensor, torch.as_tensor}


class CudaLint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the places of agentrl's sources at which a GPU would be waited for, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self._functions = _Calls(self)

    def __enter__(self) -> CudaLint:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masks = name in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        repeats = name == "aten.repeat_interleave.Tensor" and not (kwargs or {}).get("output_size")
        if name in READS | SHAPES or masks or repeats:
            self.note(name.split(".")[1] + (" by a mask" if masks else ""))
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        """Count it at the line of agentrl that asked for it."""
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(SOURCES)]
        where = f"{frames[-1].filename.removeprefix(SOURCES)[1:]} {frames[-1].name}" if frames else "elsewhere"
        self.found[f"{where}: {what}"] += 1


class _Calls(TorchFunctionMode):
    """Sees copies between host and device, which are no operation where both are the CPU."""

    def __init__(self, lint: CudaLint) -> None:
        super().__init__()
        self._lint = lint

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args[1:], *kwargs.values()]
        moves = any(isinstance(value, torch.device | str) for value in given)
        caller = traceback.extract_stack(limit=2)[0].filename
        if "/agentrl/" not in caller or caller.endswith("device_copy.py"):  # others copy from device to device
            pass
        elif func in COPIES and (func is not torch.Tensor.to or moves):
            self._lint.note(f"Tensor.{func.__name__}")
        elif func in MAKES and moves:
            self._lint.note(f"torch.{func.__name__} on a device")
        return func(*args, **kwargs)
