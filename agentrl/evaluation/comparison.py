"""The comparison of two evaluations on the same tasks: the difference with its paired interval, and the tasks that
were fixed or broke."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import FiniteFloat

from agentrl.environments.task_sampler import describe_task, task_index
from agentrl.errors import UserError
from agentrl.evaluation.outcomes import EvaluationOutcomes, list_evaluated_steps, locate_evaluation, read_outcomes
from agentrl.evaluation.scope import ACTING, read_scope
from agentrl.evaluation.statistics import (
    Estimate,
    estimate_difference,
    estimate_mean,
    estimate_unpaired_difference,
    is_right,
)
from agentrl.settings.signature import convert_value

KINDS = {(False, True): "fixed", (True, False): "broke", (False, False): "still_wrong", (True, True): "still_right"}
SAMPLED = ("seed", "eval.trials", "eval.pass_at", "model", "engine.max_num_seqs", "engine.threads", "engine.urls")


class _TaskPair(NamedTuple):
    """A task on both sides, each with a trial that shows its outcome."""

    task: int
    before: float  # mean reward
    after: float
    before_episode: str  # as ``agentrl explain`` takes it
    after_episode: str


@dataclass(frozen=True)
class Comparison:
    """Two evaluations, paired by task; made by `compare`."""

    before: str  # folders, with @STEP for one of a training run's evaluations
    after: str
    env: str
    split: str
    greedy: bool
    pass_at: float
    before_mean: Estimate  # over the common tasks
    after_mean: Estimate
    difference: Estimate  # after - before, paired by task
    unpaired: Estimate  # the same without pairing
    pairs: Mapping[str, tuple[_TaskPair, ...]]  # by what became of them: fixed, broke, still_wrong, still_right
    notes: tuple[str, ...]  # what else differs, and what was left out

    @property
    def winner(self) -> str | None:
        """Name the better side; None where the interval of the difference holds 0."""
        if not self.difference.excludes_zero:
            return None
        return self.after if self.difference.mean > 0 else self.before

    @property
    def verdict(self) -> str:
        if self.winner is None:
            return "no clear winner: the interval of the difference holds 0"
        return f"{self.winner} is better: the interval of the difference holds no 0"

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        plain = {k: v._asdict() if isinstance(v, Estimate) else v for k, v in vars(self).items()}
        pairs = {kind: [p._asdict() for p in own] for kind, own in self.pairs.items()}
        return {**plain, "pairs": pairs, "notes": list(self.notes), "winner": self.winner, "verdict": self.verdict}


def compare(
    before: str | Path,
    after: str | Path | None = None,
    *,
    greedy: bool | None = None,
    split: str | None = None,
    pass_at: float | None = None,
) -> Comparison:
    """Compare two evaluations, task by task.

    Args:
        before, after: folders of `agentrl eval`; or training runs, of which the last evaluation is taken, or the one
            that ``RUN@STEP`` names. Of one training run alone: before its first step against its last evaluation.
        greedy: the greedy trials; by default the sampled ones, where both have them.
        pass_at: the reward from which on a trial passes; by default the ``eval.pass_at`` of ``before``.

    Raises:
        UserError: they are of other environments, or share no task.
    """
    before = str(convert_value("before", before, str | Path))
    after = None if after is None else str(convert_value("after", after, str | Path))
    greedy, split = convert_value("greedy", greedy, bool | None), convert_value("split", split, str | None)
    pass_at = convert_value("pass_at", pass_at, FiniteFloat | None)
    if after is None:
        before, after = _first_and_last(before, split)
    one, other = _read_both(before, after, greedy, split)
    notes = [*_check_same(one, other)]
    if pass_at is None:
        pass_at = float(one.settings.get("eval.pass_at", 1.0))
    common = [t for t in one.tasks if t in other.tasks and one.tasks[t].prompt_digest == other.tasks[t].prompt_digest]
    earlier, later = ([side.tasks[t].rewards for t in common] for side in (one, other))
    means = estimate_mean(earlier), estimate_mean(later)
    pairs: dict[str, list[_TaskPair]] = {kind: [] for kind in KINDS.values()}
    for task in common:
        kind, pair = _pair(task, one, other, pass_at)
        pairs[kind].append(pair)
    return Comparison(
        one.label,
        other.label,
        str(one.settings.get("env.name")),
        one.split,
        one.greedy,
        pass_at,
        *means,
        estimate_difference(earlier, later),
        estimate_unpaired_difference(*means),
        {kind: tuple(own) for kind, own in pairs.items()},
        tuple(notes),
    )


def _first_and_last(run: str, split: str | None) -> tuple[str, str]:
    """Name the evaluations before and after a training."""
    folder, step = locate_evaluation(run)
    if step is not None or read_scope(folder) is not None:
        raise UserError(f"{run!r} is one evaluation: give another one to compare it with")
    steps = list_evaluated_steps(folder, split or "test")
    if len(steps) < 2:
        raise UserError(f"{run!r} was evaluated at step {steps[0]} alone: there is nothing to compare it with yet")
    return f"{folder}@{steps[0]}", f"{folder}@{steps[-1]}"


def _read_both(
    before: str, after: str, greedy: bool | None, split: str | None
) -> tuple[EvaluationOutcomes, EvaluationOutcomes]:
    if greedy is not None:
        return read_outcomes(before, greedy=greedy, split=split), read_outcomes(after, greedy=greedy, split=split)
    try:
        return read_outcomes(before, split=split), read_outcomes(after, split=split)
    except UserError as error:
        try:
            return read_outcomes(before, greedy=True, split=split), read_outcomes(after, greedy=True, split=split)
        except UserError:
            raise error from None


def _check_same(one: EvaluationOutcomes, other: EvaluationOutcomes) -> Iterator[str]:
    """Yield a note on each difference of the sides. Raises UserError: nothing is left to compare."""
    envs = one.settings.get("env.name"), other.settings.get("env.name")
    if envs[0] != envs[1] or one.split != other.split:
        what = f"env {envs[0]!r} and {envs[1]!r}" if envs[0] != envs[1] else f"split {one.split!r} and {other.split!r}"
        raise UserError(f"{one.label} and {other.label} have no task in common: {what}")
    common = one.tasks.keys() & other.tasks.keys()
    if not common:
        raise UserError(
            f"{one.label} and {other.label} have no task in common: {_describe_tasks(one)} and "
            f"{_describe_tasks(other)}; agentrl eval --first N --tasks N says which"
        )
    others = [t for t in common if one.tasks[t].prompt_digest != other.tasks[t].prompt_digest]
    changed = _list_changes(one, other)
    if len(others) == len(common):
        raise UserError(
            f"the tasks of {one.label} and {other.label} have the same numbers but other words, as "
            + describe_task(others[0], one.split)
            + (f"; what differs: {changed}" if changed else "")
        )
    if others:
        yield f"left out: {len(others)} tasks whose words differ, such as {describe_task(others[0], one.split)}"
    if (left := len(one.tasks.keys() ^ other.tasks.keys())) or one.lost or other.lost:
        lost = f", {one.lost + other.lost} that no trial of was scored" if one.lost or other.lost else ""
        yield f"restricted to the {len(common)} tasks that both have: {left} are in one alone{lost}"
    for side in (one, other):
        if side.left_out:
            yield f"{len(side.left_out)} damaged episodes of {side.label} are left out, such as {side.left_out[0]}"
    if changed:
        yield f"they differ in more than the policy: {changed}"


def _describe_tasks(side: EvaluationOutcomes) -> str:
    return (
        f"{len(side.tasks)} tasks from {task_index(min(side.tasks))} to {task_index(max(side.tasks))}"
        if side.tasks
        else "none"
    )


def _list_changes(one: EvaluationOutcomes, other: EvaluationOutcomes) -> str:
    """List the settings of the episodes that differ."""
    names = sorted(n for n in one.settings.keys() | other.settings.keys() if _affects_episodes(n))
    values = ((n, one.settings.get(n), other.settings.get(n)) for n in names)
    return "; ".join(f"{n} {a!r} -> {b!r}" for n, a, b in values if a != b and "auto" not in (a, b))


def _affects_episodes(name: str) -> bool:
    return (name in ACTING or name.partition(".")[0] in ACTING) and name not in SAMPLED


def _pair(task: int, one: EvaluationOutcomes, other: EvaluationOutcomes, pass_at: float) -> tuple[str, _TaskPair]:
    before, after = one.tasks[task], other.tasks[task]
    right = is_right(before.rewards, pass_at), is_right(after.rewards, pass_at)
    episodes = before.episode(pass_at, right[0]), after.episode(pass_at, right[1])
    return KINDS[right], _TaskPair(task, fmean(before.rewards), fmean(after.rewards), *episodes)
