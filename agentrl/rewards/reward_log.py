"""The log of reward functions beside their rewards: TRL's ``log_metric`` and ``log_extra``, and their weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from agentrl.errors import ContractError
from agentrl.types import is_number


class RewardLog:
    """Metrics and extra columns of ``size`` completions, as reward functions log them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._extras: dict[str, list[Any]] = {}
        self.weights: dict[str, float] = {}  # of rewards that set their own

    def log_metric(self, name: str, value: float) -> None:
        """Log a number under ``name``; of several under one name the mean counts. Raises ContractError."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not isfinite(number):
            raise ContractError(f"log_metric({name!r}, {value!r:.60}): the value must be a finite number")
        self._metrics[str(name)].append(number)

    def set_weight(self, reward: str, weight: float) -> None:
        """Set the weight of a reward in these completions. Raises ContractError: it is no finite number."""
        if not is_number(weight):
            raise ContractError(f"set_weight({weight!r:.60}) in reward {reward!r}: a weight is a finite number")
        self.weights[reward] = float(weight)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value for each completion. Raises ContractError where there are more or fewer."""
        values = list(values)
        if len(values) != self.size:
            raise ContractError(
                f"log_extra({column!r}, ...) was given {len(values)} values for {self.size} "
                f"completion{'s' * (self.size != 1)}; it takes one for each"
            )
        self._extras[str(column)] = values

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric."""
        return {name: fmean(values) for name, values in self._metrics.items()}

    def extras_for(self, number: int) -> dict[str, Any]:
        """Return the extra columns of one completion."""
        return {column: values[number] for column, values in self._extras.items()}
