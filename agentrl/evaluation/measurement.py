"""The rewards of a policy on tasks: means with intervals, pass@k and pass^k, faults apart from failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Self

from agentrl.errors import UserError
from agentrl.evaluation.statistics import Estimate, PassRate, estimate_difference, estimate_mean, estimate_passes
from agentrl.runs import metrics
from agentrl.types import Group, Message, Trajectory


class Trials(NamedTuple):
    """The trials of a task: ``sampled`` times as in training, and once greedily."""

    sampled: int = 1
    greedy: bool = True

    @property
    def each(self) -> int:
        return self.sampled + self.greedy


@dataclass(frozen=True)
class Measurement:
    """A mean reward over tasks with its 95 % interval, and how the tools were used."""

    reward: float  # mean over tasks of the mean over a task's scored trials
    low: float
    high: float
    stderr: float  # clustered by task
    tasks: int  # that have a scored trial
    episodes: int  # that were scored
    calls: float  # tool calls an episode
    failed_calls: float | None  # share of the calls that failed; None without calls
    turns: float
    faults: int  # episodes that the infrastructure ended: in no mean
    faults_by_kind: Mapping[str, int]
    unscored: int  # episodes whose every reward was None: in no mean
    passes: tuple[PassRate, ...]
    folder: str | None = None  # the evaluation's, where it is kept
    provoked: int = 0  # episodes that provoked a fault themselves: they count, with the floor

    @classmethod
    def of(cls, tasks: Sequence[Sequence[Trajectory]], pass_at: float = 1.0) -> Self:
        """Compute the measurement of each task's trials.

        Raises:
            UserError: not one episode could be scored; the sentence has the first fault.
        """
        episodes = [t for trials in tasks for t in trials]
        scored = [t for t in episodes if t.reward is not None]
        if not scored:
            raise UserError(f"not one of {len(episodes)} episodes could be scored. {describe_first_fault(episodes)}")
        rewards = list_scored_rewards(tasks)
        mean, calls = estimate_mean(rewards), metrics.call_metrics(scored)
        failed = calls.get("tools/failure_frequency")
        faults = Counter(t.fault.kind for t in episodes if t.fault is not None and t.is_lost)
        return cls(
            *mean,
            episodes=len(scored),
            calls=calls.get("tools/call_frequency", 0.0),
            failed_calls=failed,
            turns=fmean(t.turns for t in scored),
            faults=faults.total(),
            faults_by_kind=dict(faults),
            provoked=metrics.count_provoked(episodes),
            unscored=len(episodes) - len(scored) - faults.total(),
            passes=tuple(estimate_passes(rewards, pass_at)),
        )

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.reward, self.low, self.high, self.stderr, self.tasks)

    def metrics(self) -> dict[str, float]:
        """Return the numbers under the names of a training step."""
        values = {
            "reward": self.reward,
            "reward_stderr": self.stderr,
            "reward_low": self.low,
            "reward_high": self.high,
            "episodes": float(self.episodes),
            "tools/call_frequency": self.calls,
            "turns/mean": self.turns,
            **{f"faults/{kind}": float(n) for kind, n in self.faults_by_kind.items()},
            **({"faults/provoked": float(self.provoked)} if self.provoked else {}),
        }
        if self.failed_calls is not None:
            values["tools/failure_frequency"] = self.failed_calls
        for rate in self.passes:
            values |= {f"pass_at_{rate.k}": rate.any.mean, f"pass_hat_{rate.k}": rate.all.mean}
        return values

    def as_dict(self) -> dict[str, Any]:
        """Return the object that the summary holds."""
        plain = {k: v for k, v in vars(self).items() if k not in ("passes", "folder")}
        return plain | {"passes": [_plain_pass(rate) for rate in self.passes]}


def _plain_pass(rate: PassRate) -> dict[str, Any]:
    return {
        "k": rate.k,
        "tasks": rate.any.tasks,
        "pass_at_k": rate.any.mean,
        "pass_at_k_interval": [rate.any.low, rate.any.high],
        "pass_hat_k": rate.all.mean,
        "pass_hat_k_interval": [rate.all.low, rate.all.high],
    }


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of tasks, sampled and greedy, with the rewards that a later one is paired with. Plain data."""

    sampled: Measurement | None
    greedy: Measurement | None
    rewards: Mapping[int, tuple[float, ...]]  # of the sampled trials that were scored, by task
    greedy_rewards: Mapping[int, tuple[float, ...]]
    first_rewards: Mapping[int, float | None]  # of each task's first trial
    conversations: Mapping[int, tuple[Message, ...]]  # likewise

    @classmethod
    def of(cls, groups: Sequence[Group], trials: Trials, pass_at: float = 1.0) -> Self:
        """Evaluate groups of ``trials.sampled`` sampled members and, last, the greedy one."""
        sampled = [g.trajectories[: trials.sampled] for g in groups]
        greedy = [g.trajectories[trials.sampled :] for g in groups]
        tasks = [g.task for g in groups]
        return cls(
            Measurement.of(sampled, pass_at) if trials.sampled else None,
            Measurement.of(greedy, pass_at) if trials.greedy else None,
            dict(zip(tasks, list_scored_rewards(sampled), strict=True)),
            dict(zip(tasks, list_scored_rewards(greedy), strict=True)),
            {g.task: g.trajectories[0].reward for g in groups},
            {g.task: g.trajectories[0].messages for g in groups},
        )

    @property
    def parts(self) -> list[tuple[str, Measurement]]:
        """List the measurements that were made, by name."""
        both = (("sampled", self.sampled), ("greedy", self.greedy))
        return [(name, measured) for name, measured in both if measured is not None]

    @property
    def first(self) -> Measurement:
        """Return the sampled measurement; the greedy one if nothing was sampled."""
        return self.parts[0][1]

    def metrics(self, prefix: str = "eval/") -> dict[str, float]:
        """Return the numbers for ``metrics.jsonl``: the training names behind the prefix."""
        values = {f"{prefix}{name}": v for name, v in self.sampled.metrics().items()} if self.sampled else {}
        if self.greedy:
            own = ("reward", "reward_stderr", "reward_low", "reward_high")
            values |= {f"{prefix}greedy_{name}": v for name, v in self.greedy.metrics().items() if name in own}
        return values

    def as_dict(self) -> dict[str, Any]:
        return {name: measured.as_dict() for name, measured in self.parts}


def summarize_change(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Return the change of the sampled and the greedy reward, paired by task, as the summary holds it.

    None if no task was scored both times.
    """
    return {
        "sampled": _difference(before.rewards, after.rewards),
        "greedy": _difference(before.greedy_rewards, after.greedy_rewards),
    }


def summarize_pair(before: Evaluation | None, after: Evaluation | None) -> dict[str, Any]:
    """Return two evaluations of the same tasks with their difference; null for what was not evaluated."""
    return {
        "before": before.as_dict() if before else None,
        "after": after.as_dict() if after else None,
        "difference": summarize_change(before, after) if before and after else None,
    }


def _difference(before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]) -> dict[str, Any] | None:
    common = [task for task in before if task in after]
    estimate = estimate_difference([before[t] for t in common], [after[t] for t in common])
    return estimate._asdict() if estimate.tasks else None


def list_scored_rewards(tasks: Sequence[Sequence[Trajectory]]) -> list[tuple[float, ...]]:
    """List each task's rewards of the trials that were scored."""
    return [tuple(t.reward for t in trials if t.reward is not None) for trials in tasks]


def describe_first_fault(episodes: Sequence[Trajectory]) -> str:
    """Describe the first fault, if there is nothing but faults."""
    for t in episodes:
        if t.fault is not None:
            return f"The first fault ({t.fault.kind}): {_in_one_line(t.fault.message)}"
    names = ", ".join(sorted({name for t in episodes for name in t.rewards})) or "none is named"
    return (
        f"Every reward was None ({names}): none applied to these tasks, or their solutions cannot be read "
        "(docs/rewards.md says which forms can)."
    )


_FRAME = re.compile(r'^  File ".*?([^/"]+)", line (\d+)', re.MULTILINE)


def _in_one_line(message: str) -> str:
    """Shorten a fault's traceback to what was raised, and the last line of the code that raised it."""
    head, traceback, trace = message.partition(": Traceback (most recent call last):")
    if not traceback:
        return message
    frames = _FRAME.findall(trace)
    where = f" ({frames[-1][0]}, line {frames[-1][1]})" if frames else ""
    return f"{head} raised {trace.strip().splitlines()[-1].strip()}{where}"
