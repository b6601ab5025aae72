"""A model's own cache, of whatever class: keys, values, convolutions and states, as a tree of tensors by row.

Nothing is assumed about the class but that its tensors have the rows as their first dimension; that it is so is part
of the proof (`agentrl.engines.embedded.plain_view`). Caches of the same shape, at the same position, can be stacked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

_LEAVES = (Tensor, PreTrainedConfig, nn.Module, type)


OwnCache = dict[str, Any]  # what a model returned, by the name of the argument that takes it


def stack_caches(caches: Sequence[OwnCache]) -> OwnCache:
    """Stack caches of the same `describe_cache`, one row after the other."""
    stacked: OwnCache = _map_tensors(lambda tensors: torch.cat(list(tensors)), caches)
    return stacked


def select_rows(cache: OwnCache, rows: Sequence[int]) -> OwnCache:
    """Copy some rows of a cache, in that order. A row may be copied more than once."""

    def select(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0][torch.tensor(rows, device=tensors[0].device)]

    selected: OwnCache = _map_tensors(select, [cache])
    return selected


def describe_cache(cache: OwnCache) -> Hashable:
    """Describe all that is the same for the rows of one cache: shapes but for the rows, positions, flags."""
    return tuple(_describe(path, leaf) for path, leaf in _iterate_leaves(cache, "", set()))


def count_bytes(cache: OwnCache) -> int:
    """Count the bytes of a cache's tensors."""
    return sum(leaf.nbytes for _, leaf in _iterate_leaves(cache, "", set()) if isinstance(leaf, Tensor))


def _map_tensors(function: Callable[[Sequence[Tensor]], Tensor], trees: Sequence[Any]) -> Any:
    """Copy the first of several trees of one shape, with ``function`` of the tensors that stand at each place."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(trees) if first.ndim else first.clone()
    if isinstance(first, dict):
        copied = copy.copy(first)
        copied |= {key: _map_tensors(function, [tree[key] for tree in trees]) for key in first}
        return copied
    if isinstance(first, list | tuple):
        parts = [_map_tensors(function, part) for part in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if not _is_node(first):
        return first
    copied = copy.copy(first)
    vars(copied).update(_map_tensors(function, [vars(tree) for tree in trees]))
    return copied


def _iterate_leaves(tree: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if _is_node(tree):
        if id(tree) in seen:
            return
        seen.add(id(tree))
        tree = vars(tree)
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _iterate_leaves(value, f"{path}.{key}", seen)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _iterate_leaves(value, f"{path}.{index}", seen)
    else:
        yield path, tree


def _is_node(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _LEAVES) and not callable(value)


def _describe(path: str, leaf: object) -> Hashable:
    if isinstance(leaf, Tensor):
        return path, (leaf.shape[1:], leaf.dtype) if leaf.ndim else float(leaf)
    return path, leaf if isinstance(leaf, int | float | str | None) else type(leaf).__name__
