"""The state of a run as plain data: JSON, and tensors beside it, that are read without running anything.

A value is a number, a text, a boolean, None, a tensor, a list, tuple, set or dict of such, or an object of one of the
classes in ``CLASSES``. What comes back is equal to what was given, floats to the last bit.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.environments.task_sampler import Outcome
from agentrl.evaluation.measurement import Evaluation, Measurement
from agentrl.evaluation.statistics import Estimate, PassRate
from agentrl.health.dead_end import DeadEnd
from agentrl.health.monitor import HealthMonitor
from agentrl.models.saved_tensor import SavedTensor, StagedTensor
from agentrl.rollout.scheduler import ScheduledGroup, SchedulerState
from agentrl.runs.overlap import PromptOverlap
from agentrl.types import CallRecord, Fault, Group, KeptTokens, RoutedExperts, Segment, Stop, Trajectory

CLASSES: Mapping[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(CallRecord, DeadEnd, Estimate, Evaluation, Fault, Group, HealthMonitor, KeptTokens, Measurement, Outcome),
        *(PassRate, PromptOverlap, RoutedExperts, ScheduledGroup, SchedulerState, Segment, Stop, Trajectory),
    )
}
_TAG = "~"  # names the kind of a value that JSON has no word for
_ARRAYS = {"i": "int32", "B": "uint8", "H": "uint16"}  # Python's codes of arrays that a state holds
_CODES = {name: code for code, name in _ARRAYS.items()}
_LONG = 256  # numbers, from which on a list of them is a tensor
_DEPTH = 60  # of values in values


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Encode a value as JSON and tensors by their names in it.

    Raises:
        TypeError: it holds an object of another class; the sentence names the class.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, tensors, _DEPTH), tensors


def decode(tree: Any, tensors: Mapping[str, Tensor | SavedTensor]) -> Any:
    """Decode what `encode` returned; a tensor that is given as one in files stays one.

    Raises:
        OSError: the files of a tensor cannot be read.
        ValueError: it is nothing that `encode` returns.
    """
    try:
        return _decode(tree, tensors, 2 * _DEPTH)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _encode(value: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth < 0:
        raise TypeError(f"values nested more than {_DEPTH} deep")
    if isinstance(value, Trajectory):
        value = replace(value)  # one that a player sent is read whole then
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "name": _keep(value, tensors)}
    if isinstance(value, StagedTensor):  # each process writes its piece
        return {_TAG: "tensor", "name": value.name}
    if CLASSES.get(kind.__name__) is kind:
        return {_TAG: kind.__name__, "of": _encode_object(value, tensors, depth - 1)}
    if kind in (list, tuple, set, frozenset):
        return _encode_items(kind.__name__, list(value), tensors, depth - 1)
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, depth - 1)
    if isinstance(value, array) and value.typecode in _ARRAYS:
        numbers = np.array(value, _ARRAYS[value.typecode])
        return {_TAG: numbers.dtype.name, "name": _keep(torch.from_numpy(numbers.view(f"i{value.itemsize}")), tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_TAG: "array", "name": _keep(torch.from_numpy(value.copy()), tensors)}
    if isinstance(value, np.generic | Enum):
        return _encode(value.item() if isinstance(value, np.generic) else value.value, tensors, depth - 1)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def _keep(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach()
    return name


def _encode_object(value: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    if isinstance(value, Enum):
        return value.value
    names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
    return {name: _encode(getattr(value, name), tensors, depth) for name in names}


def _encode_items(kind: str, items: list[Any], tensors: dict[str, Tensor], depth: int) -> Any:
    if len(items) >= _LONG and (numbers := _as_numbers(items)) is not None:
        word, values = numbers
        return {_TAG: kind, word: _keep(torch.from_numpy(values), tensors)}
    encoded = [_encode(item, tensors, depth) for item in items]
    return encoded if kind == "list" else {_TAG: kind, "of": encoded}


def _as_numbers(items: list[Any]) -> tuple[str, Any] | None:
    """Return a list's numbers as an array, if they are all floats, or all integers of 64 bits."""
    kinds = set(map(type, items))
    if kinds == {float}:
        return "numbers", np.array(items, dtype=np.float64)
    if kinds != {int}:
        return None
    low, high = min(items), max(items)
    if low >= -(1 << 63) and high < 1 << 63:
        return "numbers", np.array(items, dtype=np.int64)
    return ("unsigned", np.array(items, dtype=np.uint64).view(np.int64)) if low >= 0 and high < 1 << 64 else None


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], depth: int) -> Any:
    if type(value) is not Counter and _TAG not in value and all(type(key) is str for key in value):
        return {key: _encode(item, tensors, depth) for key, item in value.items()}
    pairs = [[_encode(key, tensors, depth), _encode(item, tensors, depth)] for key, item in value.items()]
    return {_TAG: "Counter" if type(value) is Counter else "dict", "of": pairs}


def _decode(tree: Any, tensors: Mapping[str, Tensor | SavedTensor], depth: int) -> Any:
    if depth < 0:
        raise ValueError("it is nested too deeply")
    if isinstance(tree, list):
        return [_decode(item, tensors, depth - 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if (kind := tree.get(_TAG)) is None:
        return {key: _decode(item, tensors, depth - 1) for key, item in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind in _CODES:
        return array(_CODES[kind], _read(tensors[tree["name"]]).numpy().tobytes())
    if kind == "array":
        return _read(tensors[tree["name"]]).numpy().copy()
    if kind in CLASSES:
        return _build(CLASSES[kind], _decode(tree["of"], tensors, depth - 1))
    if "of" in tree:
        items = [_decode(item, tensors, depth - 1) for item in tree["of"]]
    else:
        numbers = _read(tensors[tree["unsigned" if "unsigned" in tree else "numbers"]]).numpy()
        items = (numbers.view(np.uint64) if "unsigned" in tree else numbers).tolist()
    return _CONTAINERS[kind](items)


def _read(tensor: Tensor | SavedTensor) -> Tensor:
    return tensor.read() if isinstance(tensor, SavedTensor) else tensor


_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {
    **{"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict},
    "Counter": lambda pairs: Counter(dict(pairs)),
}


def _build(cls: Any, parts: Any) -> Any:
    return cls(parts) if issubclass(cls, Enum) else cls(**parts)
