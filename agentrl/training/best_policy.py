"""The best policy so far, by a metric of the evaluations: for early stopping, and for the model at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import isfinite
from typing import Any

from torch import Tensor

from agentrl.errors import UserError, suggest
from agentrl.learner.learner import Learner
from agentrl.settings.evaluation import EvalConfig
from agentrl.settings.schema import TrainConfig


class BestPolicy:
    """Compares evaluations by ``eval.metric``, and keeps the weights of the best one where the run is to end with it.

    A checkpoint holds it all, so a run that resumes has compared what it would have.
    """

    def __init__(self, config: TrainConfig, learner: Learner) -> None:
        self.eval, self._keeps, self._learner = config.eval, config.run.load_best, learner
        self.step: int | None = None  # of the best evaluation
        self.value = 0.0  # of the metric there
        self.waited = 0  # evaluations since then
        self._weights: Mapping[str, Tensor] | None = None

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value, "waited": self.waited, "weights": self._weights}

    def load(self, state: Mapping[str, Any]) -> None:
        self.step, self.value, self.waited = state["step"], state["value"], state["waited"]
        self._weights = state["weights"]
        if self._keeps and self.step is not None and self._weights is None:
            raise UserError("run.load_best: the run kept no weights of its best evaluation so far; begin it anew")

    def summary(self) -> dict[str, Any] | None:
        """Return the best evaluation as the summary holds it; None where none was compared."""
        if self.step is None:
            return None
        return {"metric": self.eval.metric, "step": self.step, "value": self.value, "stopped_early": self.stops}

    @property
    def stops(self) -> bool:
        """Return True if ``eval.patience`` evaluations were no better."""
        return self.eval.patience is not None and self.waited >= self.eval.patience

    def check_metric(self, values: Mapping[str, float]) -> None:
        """Raise UserError where no evaluation will have the metric, by the values of the first one."""
        if _is_used(self.eval, self._keeps) and self.eval.metric not in values:
            raise UserError(
                f"eval.metric {self.eval.metric!r}: no evaluation has it{suggest(self.eval.metric, values)}"
            )

    def observe(self, step: int, values: Mapping[str, float]) -> str | None:
        """Compare the evaluation of a step; return a sentence where it ends the run, or could not be compared."""
        if not _is_used(self.eval, self._keeps):
            return None
        name, value = self.eval.metric, values.get(self.eval.metric)
        if value is None or not isfinite(value):
            return f"no {name} at step {step}: it is not compared"
        if self.step is None or self._gain(value) > self.eval.min_delta:
            self.step, self.value, self.waited = step, value, 0
            self._weights = self._learner.copy_weights() if self._keeps else None
            return None
        self.waited += 1
        if not self.stops:
            return None
        return (
            f"{name} was no better than {self.value:.4g} (step {self.step}) in {self.waited} evaluations: the run ends "
            "(eval.patience)"
        )

    def _gain(self, value: float) -> float:
        return value - self.value if self.eval.greater_is_better else self.value - value

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the policy have the weights of the best evaluation, if they are kept, until the block ends."""
        with nullcontext() if self._weights is None else self._learner.use_weights(self._weights):
            yield

    def restore(self) -> str | None:
        """Give the policy the weights of the best evaluation for good, if they are kept; return a sentence of it."""
        if self._weights is None:
            return None
        self._learner.load_weights(self._weights)
        return f"the model is that of step {self.step}, the best one: {self.eval.metric} {self.value:.4g}"


def _is_used(config: EvalConfig, keeps: bool) -> bool:
    return keeps or config.patience is not None
