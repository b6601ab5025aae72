"""Metrics of one's own: functions of episodes that ``run.metrics`` names, for each step and each evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from agentrl.errors import ConfigError, ContractError, describe_raised
from agentrl.runs.metrics import Metrics
from agentrl.settings.registry import load_registered
from agentrl.types import Trajectory, is_number

MetricFunction = Callable[[Sequence[Trajectory]], object]  # a number, numbers by name, or None


class MetricFunctions:
    """Functions of the episodes of a step, or of an evaluation, that an infrastructure error did not end.

    One returns a number, which is logged under the function's name; a mapping, whose numbers are logged under
    ``name/key``; or None where there is nothing to measure.

    Args:
        functions: registered names, ``module:function``, ``file.py:function``, or the functions.

    Raises:
        UserError: one cannot be loaded.
        ConfigError: one is no plain function, or has a name that is taken.
    """

    def __init__(self, functions: Sequence[str | MetricFunction]) -> None:
        self._functions: dict[str, MetricFunction] = {}
        for given in functions:
            function = load_registered("metric", given) if isinstance(given, str) else given
            if not callable(function) or inspect.isclass(function) or inspect.iscoroutinefunction(function):
                raise ConfigError(f"run.metrics takes plain functions of a list of episodes, not {given!r:.80}")
            name = getattr(function, "__name__", type(function).__name__)
            if name in ("step", "eval"):
                raise ConfigError(f"run.metrics: a row's {name!r} is agentrl's own; rename the function {name}")
            if name in self._functions:
                raise ConfigError(f"run.metrics: two functions are called {name!r}; rename one")
            self._functions[name] = function

    def compute(self, episodes: Iterable[Trajectory], taken: Mapping[str, float], prefix: str = "") -> Metrics:
        """Return the numbers under ``prefix`` and their names.

        Args:
            taken: the numbers that are logged beside them.

        Raises:
            ContractError: a function raises, returns no number, or one whose name is taken.
        """
        valid = [t for t in episodes if t.fault is None]
        numbers = {
            f"{prefix}{name}": value
            for function_name, function in self._functions.items()
            for name, value in _call(function_name, function, valid).items()
        }
        if clash := sorted(numbers.keys() & taken.keys()):
            raise ContractError(f"run.metrics: agentrl logs a number {clash[0]!r} itself; rename the function")
        return numbers


def _call(name: str, function: MetricFunction, episodes: Sequence[Trajectory]) -> Metrics:
    try:
        result = function([*episodes])  # a list of its own
    except (Exception, SystemExit) as error:  # a user's own code
        raise ContractError(f"run.metrics: {name} raised {describe_raised(error)}") from error
    if result is None:
        return {}
    named = {f"{name}/{key}": v for key, v in result.items()} if isinstance(result, Mapping) else {name: result}
    numbers: Metrics = {}
    for key, value in named.items():
        if not is_number(value):
            raise ContractError(f"run.metrics: {key} is no finite number: {value!r:.80}")
        numbers[key] = float(value)
    return numbers
