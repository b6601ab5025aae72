"""Entries: what is chosen by name in the algorithm, and what each one declares of itself.

A loss, an advantage, an importance-sampling rule, an optimizer, a sampler or an engine is a function (or a class) with
a declaration. Its keyword-only arguments are its parameters: their types check the settings, their docstring describes
them. The positional ones are what the framework passes. The config, the help, the docs, the page and the learner read
this declaration, and torch is not needed to read it.

    loss                 (t: Tokens, log_ratio) -> a loss for each token, or a pair: them, and values of its metrics
    advantage            (groups) -> for each member of each group a number, or one a turn
    importance_sampling  (t: Tokens) -> a weight for each token
    optimizer            (policy, lr) -> a torch optimizer, or a list of them
    sampler              (count, seed) -> a TaskSampler
    engine               (policy, config) -> an OpenEngine
    context              (prompt, summary) -> the messages that the next context begins with
    player_launcher      (plan) -> an async context manager, within which the plan's players run
    run_launcher         (plan, say) -> an async context manager of the places that ranks and servers run at
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import pydantic

from agentrl.errors import ContractError, suggest
from agentrl.settings.signature import build_arguments_model

Pick = Literal["mean", "min", "max"]
REDUCTIONS = ("token_mean", "update_token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
_BLANK = re.compile(r"\{(\w+)(?::(\+?\.?\d?[gfe%]?))?\}")  # {tau} or {tau:.3g}; nothing longer: others wrote it


@dataclass(frozen=True)
class Metric:
    """A number that an entry computes for each micro-batch.

    Args:
        description: its formula, in words.
        pick: how the values of all micro-batches become one number.
        unit: of the number, if it has one.
    """

    description: str
    pick: Pick = "mean"
    unit: str = ""


@dataclass(frozen=True)
class Entry:
    """A thing that is chosen by name, with its declaration; calling it calls its function.

    Args:
        kind: ``loss``, ``advantage`` ...
        function: what is called; a class is made.
        explain: a line for `agentrl explain`, with parameters in braces; by default the docstring's first line.
        metrics: of a loss, by name.
        reduction: of a loss, one of ``REDUCTIONS``.
        corrects: a loss that weighs by ``Tokens.correction`` itself, token by token.
        every_row: a loss with a gradient where the advantage is 0 too; others do not see such rows.
        by_row: an importance-sampling rule whose ratio is of whole rows.
        check: raises ValueError for parameters that do not go together.
    """

    kind: str
    function: Callable[..., object]
    explain: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    reduction: str = ""
    corrects: bool = False
    every_row: bool = False
    by_row: bool = False
    check: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        what = f"{self.kind} {getattr(self.function, '__name__', type(self.function).__name__)!r}"
        if not callable(self.function):
            raise ContractError(f"{self.kind} {self.function!r:.80} is nothing that can be called")
        if inspect.iscoroutinefunction(self.function) or inspect.isasyncgenfunction(self.function):
            raise ContractError(f"{what} is an `async def`; it is called where nothing is awaited: write `def`")
        if self.kind == "loss" and self.reduction not in REDUCTIONS:
            raise ContractError(f"{what}: no reduction {self.reduction!r}{suggest(self.reduction, REDUCTIONS)}")
        object.__setattr__(self, "metrics", {n: _as_metric(what, n, m) for n, m in dict(self.metrics).items()})

    def __call__(self, *arguments: object, **parameters: object) -> Any:
        return self.function(*arguments, **parameters)

    @property
    def summary(self) -> str:
        """Return the first line of its documentation."""
        return (inspect.getdoc(self.function) or "").strip().partition("\n")[0]

    @cached_property
    def arguments(self) -> type[pydantic.BaseModel]:
        """Build the model of its parameters. Raises ContractError if one has no type."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return build_arguments_model(self.function, f"{self.kind} {name!r}", described=True, keyword_only=True)

    @cached_property
    def parameters(self) -> dict[str, pydantic.fields.FieldInfo]:
        """Return its parameters by name: type, default and description."""
        return {f.alias or name: f for name, f in self.arguments.model_fields.items()}

    def describe(self, parameters: Mapping[str, object]) -> str:
        """Return its line for ``explain``, with the values of parameters filled in."""
        return fill_blanks(self.explain or self.summary, parameters)


def _as_metric(what: str, name: str, metric: object) -> Metric:
    if isinstance(metric, str) and metric:
        metric = Metric(metric)
    if not isinstance(metric, Metric):
        raise ContractError(f"{what}: metrics[{name!r}] is a description, or a Metric, not {metric!r:.80}")
    return metric


def fill_blanks(text: str, values: Mapping[str, object]) -> str:
    """Fill ``{name}`` and ``{name:.3g}`` with values; leave a name that has none as it is.

    It does less than ``str.format``, so that a text from a stranger's run folder can do nothing.
    """

    def fill(blank: re.Match[str]) -> str:
        name, form = blank.groups()
        if name not in values:
            return blank[0]
        value = values[name]
        if form and isinstance(value, int | float) and not isinstance(value, bool):
            return format(value, form)
        return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)

    return _BLANK.sub(fill, text)


Decorator = Callable[[Callable[..., object]], Entry]


def loss(
    *,
    reduction: str = "token_mean",
    metrics: Mapping[str, Metric | str] | None = None,
    explain: str = "",
    corrects: bool = False,
    every_row: bool = False,
    check: Callable[..., None] | None = None,
) -> Decorator:
    """Declare a loss: ``(t: Tokens, log_ratio: Tensor, *, parameters) -> Tensor``, one entry a trained token.

    With ``metrics`` it may return a pair: the losses, and a tensor of values for each declared name.
    """
    named: dict[str, Any] = {"metrics": dict(metrics or {}), "reduction": reduction, "explain": explain}
    return partial(_make_entry, "loss", corrects=corrects, every_row=every_row, check=check, **named)


def _make_entry(kind: str, function: Callable[..., object], **declared: Any) -> Entry:
    return Entry(kind, function, **declared)


@dataclass(frozen=True)
class _Declare:
    """A decorator for entries of one kind."""

    kind: str

    def __call__(
        self, *, explain: str = "", by_row: bool = False, check: Callable[..., None] | None = None
    ) -> Decorator:
        return partial(_make_entry, self.kind, explain=explain, by_row=by_row, check=check)


advantage, importance_sampling = _Declare("advantage"), _Declare("importance_sampling")
optimizer, sampler = _Declare("optimizer"), _Declare("sampler")
engine, call_format = _Declare("engine"), _Declare("call_format")
context, player_launcher, run_launcher = _Declare("context"), _Declare("player_launcher"), _Declare("run_launcher")


def as_entry(kind: str, thing: object) -> Entry:
    """Return an entry, or make one of a plain function or class, with the defaults of its kind.

    Raises:
        ContractError: it is an entry of another kind, or nothing that can be called.
    """
    if isinstance(thing, Entry):
        if thing.kind != kind:
            raise ContractError(f"it is declared as {_with_article(thing.kind)}, not as {_with_article(kind)}")
        return thing
    if not callable(thing):
        raise ContractError(f"{thing!r:.80} is nothing that can be called")
    return Entry(kind, thing, reduction="token_mean" if kind == "loss" else "")


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeio' else 'a'} {kind.replace('_', ' ')}"
