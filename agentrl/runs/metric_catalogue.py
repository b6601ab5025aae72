"""The metrics of a run: each name with its formula, its unit and the module that makes it.

`format_page` writes docs/metrics.md of it: ``python -m agentrl.runs.metric_catalogue > docs/metrics.md``. The metrics
of losses are those that their entries declare. A word in capitals stands for a name: of a reward, a tool, a lane.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from agentrl.errors import ContractError
from agentrl.settings.catalogue import BoundEntry, list_own_entries


class _Described(NamedTuple):
    """A metric. ``made``: the module that makes it."""

    name: str
    formula: str
    unit: str
    made: str

    def matches(self, name: str) -> bool:
        """Return True if this describes a name."""
        pattern = re.sub(r"[A-Z]{2,}|(?<=_)K$|\\\.\\\.\\\.", r"[^\\s]+", re.escape(self.name))
        return re.fullmatch(pattern, name) is not None


_METRICS, _LEARNER = "agentrl/runs/metrics.py", "agentrl/learner/learner.py"
_OBJECTIVE, _TIMELINE = "agentrl/learner/losses/objective.py", "agentrl/runtime/timeline.py"
_RECORDER, _STEP = "agentrl/training/recorder.py", "agentrl/training/step.py"
_MEASURED, _SUMMARY = "agentrl/evaluation/measurement.py", "agentrl/training/summary.py"

STEP = (
    _Described("step", "the step, from 1; 0 is the evaluation before the first one", "", _RECORDER),
    _Described("reward", "mean reward of the episodes that were scored", "reward", _METRICS),
    _Described("reward_std", "mean over the groups of the standard deviation of their rewards", "reward", _METRICS),
    _Described("rewards/NAME/mean", "mean of a reward component, over the episodes it applies to", "reward", _METRICS),
    _Described("rewards/NAME/std", "its standard deviation over the same episodes", "reward", _METRICS),
    _Described("rewards/NAME/weight", "mean weight of a component that sets its own", "", _METRICS),
    _Described("rewards/NAME/unscorable", "episodes for which it returned None", "episodes", _METRICS),
    _Described("frac_reward_zero_std", "zero-variance groups / groups that are learned from", "share", _METRICS),
    _Described("groups/rolled_out", "groups of the step, resampled ones too", "groups", _METRICS),
    _Described("groups/kept", "groups that were learned from", "groups", _METRICS),
    _Described("groups/dropped", "groups with fewer scored episodes than rollout.min_group_size", "groups", _METRICS),
    _Described("groups/resampled", "groups that were replaced by others", "groups", _RECORDER),
    _Described("num_tokens", "tokens of all valid episodes: prompts, turns, observations", "tokens", _METRICS),
    _Described("sampled_tokens", "tokens that the model sampled, shared ones once", "tokens", _METRICS),
    _Described("turns/mean", "mean number of turns", "turns", _METRICS),
    _Described("completions/mean_length", "mean of the sampled tokens of an episode", "tokens", _METRICS),
    _Described("completions/min_length", "the fewest", "tokens", _METRICS),
    _Described("completions/max_length", "the most", "tokens", _METRICS),
    _Described("completions/clipped_ratio", "episodes that stopped at max_tokens / valid episodes", "share", _METRICS),
    _Described(
        "completions/mean_terminated_length", "the mean without those that stopped at max_tokens", "tokens", _METRICS
    ),
    _Described("completions/min_terminated_length", "the fewest of those", "tokens", _METRICS),
    _Described("completions/max_terminated_length", "the most of those", "tokens", _METRICS),
    _Described("tools/call_frequency", "mean number of tool calls of an episode", "calls", _METRICS),
    _Described("tools/failure_frequency", "calls that did not end well / all calls", "share", _METRICS),
    _Described(
        "tools/error/KIND",
        "calls with an error of a kind (parse, unknown_tool, arguments, tool, provoked) / all calls",
        "share",
        _METRICS,
    ),
    _Described("tools/NAME/calls", "calls of a tool", "calls", _METRICS),
    _Described("tools/NAME/failures", "of them, those that failed", "calls", _METRICS),
    _Described("tools/NAME/timeouts", "of them, those that ran into its time-out", "calls", _METRICS),
    _Described("tools/NAME/p50_s", "median duration of a call", "s", _METRICS),
    _Described("tools/NAME/p95_s", "95th percentile of its duration", "s", _METRICS),
    _Described("stops/REASON", "valid episodes that stopped for a reason / valid episodes", "share", _METRICS),
    _Described(
        "faults/provoked",
        "episodes whose own request provoked an infrastructure error: a call was told so, or they earned the floor",
        "episodes",
        _METRICS,
    ),
    _Described("faults/KIND", "episodes that an infrastructure error of the world's ended", "episodes", _METRICS),
    _Described("episodes", "episodes that were rolled out for the step", "episodes", _RECORDER),
    _Described(
        "episodes/OUTCOME", "of them, those with an outcome (agentrl/credit.py); they sum to all", "episodes", _METRICS
    ),
    _Described(
        "staleness/mean",
        "mean number of updates between a token's sampling and the one that trains it",
        "updates",
        _METRICS,
    ),
    _Described("staleness/max", "the most", "updates", _METRICS),
    _Described(
        "oversample/cancelled", "episodes that were cancelled because their group was full", "episodes", _RECORDER
    ),
    _Described("scored_rows", "rows in the denominators of the loss", "rows", _LEARNER),
    _Described("scored_tokens", "their trained tokens", "tokens", _LEARNER),
    _Described("trained_rows", "rows with an advantage other than 0", "rows", _LEARNER),
    _Described("trained_tokens", "their trained tokens", "tokens", _LEARNER),
    _Described("forwarded_rows", "rows that went through the model", "rows", _LEARNER),
    _Described("forwarded_tokens", "their trained tokens: the means below are over these", "tokens", _LEARNER),
    _Described("loss", "the sum over tokens of weight x loss, mean over the optimizer steps", "", _LEARNER),
    _Described("grad_norm", "norm of the gradient before clipping, mean over the optimizer steps", "", _LEARNER),
    _Described(
        "entropy",
        "mean entropy at the trained tokens of what was sampled from: temperature, penalty, kept tokens where known",
        "nats",
        _OBJECTIVE,
    ),
    _Described("aux_loss", "balancing loss of a mixture of experts, before its coefficient", "", _LEARNER),
    _Described(
        "router/replay_disagreement",
        "of replayed tokens and layers: those that the policy's own router would send to another set of experts",
        "share",
        "agentrl/learner/router_replay.py",
    ),
    _Described(
        "router/replayed",
        "tokens of forwarded rows, prompts included, whose experts the engine says (learner.router_replay)",
        "share",
        "agentrl/learner/router_replay.py",
    ),
    _Described("kl", "mean of k3, exp(d) - d - 1 with d = log p_ref - log p (times r by default)", "nats", _OBJECTIVE),
    _Described(
        "sampling/sampling_logp_difference/PICK",
        "mean and maximum of |log p_learner - log p_engine|",
        "nats",
        _OBJECTIVE,
    ),
    _Described(
        "sampling/importance_sampling_ratio/PICK",
        "mean, minimum and maximum of the weights that learner.importance_sampling_mode gave",
        "",
        _OBJECTIVE,
    ),
    _Described("lr", "learning rate of the step", "", _STEP),
    _Described("policy_version", "updates of the policy so far", "updates", _STEP),
    _Described("stage", "number of the stage, from 1, where the run has several", "", _STEP),
    _Described("step_time", "wall time of the step", "s", _RECORDER),
    _Described("cpu_seconds", "processor time of the step, of this process", "s", _RECORDER),
    _Described(
        "tokens_per_second", "sampled tokens of the turns that ended in the step / step_time", "tokens/s", _RECORDER
    ),
    _Described(
        "time/LANE",
        "time in which a lane (generate, tools, env, learn, sync, write, tool/NAME ...) was busy",
        "s",
        _TIMELINE,
    ),
    _Described("wait/LANE", "time that the step waited for a lane; they sum to step_time", "s", _TIMELINE),
    _Described("clock/unix", "when the line was written, since 1970", "s", _TIMELINE),
    _Described("clock/elapsed", "age of the run, without the time between a kill and a resume", "s", _TIMELINE),
    _Described("total/episodes", "episodes of the run so far", "episodes", _RECORDER),
    _Described("total/sampled_tokens", "sampled tokens of the run so far", "tokens", _RECORDER),
)

EVALUATION = (
    _Described("eval/reward", "mean over the tasks of the mean reward of their sampled trials", "reward", _MEASURED),
    _Described("eval/reward_stderr", "its standard error, by tasks", "reward", _MEASURED),
    _Described("eval/reward_low", "lower end of its 95 % interval", "reward", _MEASURED),
    _Described("eval/reward_high", "upper end of its 95 % interval", "reward", _MEASURED),
    _Described("eval/greedy_reward", "the same of the greedy trials", "reward", _MEASURED),
    _Described("eval/greedy_reward_stderr", "its standard error, by tasks", "reward", _MEASURED),
    _Described("eval/greedy_reward_low", "lower end of its 95 % interval", "reward", _MEASURED),
    _Described("eval/greedy_reward_high", "upper end of its 95 % interval", "reward", _MEASURED),
    _Described("eval/episodes", "sampled episodes that were scored", "episodes", _MEASURED),
    _Described("eval/tools/call_frequency", "mean number of tool calls of an episode", "calls", _MEASURED),
    _Described("eval/tools/failure_frequency", "calls that did not end well / all calls", "share", _MEASURED),
    _Described("eval/turns/mean", "mean number of turns", "turns", _MEASURED),
    _Described("eval/faults/provoked", "episodes that provoked one themselves", "episodes", _MEASURED),
    _Described("eval/faults/KIND", "episodes that an infrastructure error of the world's ended", "episodes", _MEASURED),
    _Described(
        "eval/pass_at_K",
        "probability that one of k trials passes (eval.pass_at), mean over the tasks",
        "share",
        _MEASURED,
    ),
    _Described("eval/pass_hat_K", "probability that all of k trials pass, mean over the tasks", "share", _MEASURED),
    _Described("eval/SET/...", "any of these, of a set of eval.sets", "", _MEASURED),
    _Described("eval/runtime", "wall time of the evaluation", "s", _RECORDER),
    _Described("eval/cpu_seconds", "its processor time", "s", _RECORDER),
    _Described("eval/time/LANE", "time in which a lane was busy", "s", _TIMELINE),
    _Described("eval/wait/LANE", "time that the evaluation waited for a lane", "s", _TIMELINE),
    _Described("clock/unix", "when the line was written, since 1970", "s", _TIMELINE),
    _Described("clock/elapsed", "age of the run", "s", _TIMELINE),
    _Described("step", "updates before the evaluation", "", _RECORDER),
)

SUMMARY = (
    _Described("steps", "steps that were made", "steps", _SUMMARY),
    _Described("reward_before", "eval/reward before the first step", "reward", _SUMMARY),
    _Described("reward_after", "eval/reward after the last one; null if the run was interrupted", "reward", _SUMMARY),
    _Described("greedy_before", "eval/greedy_reward before the first step", "reward", _SUMMARY),
    _Described("greedy_after", "eval/greedy_reward after the last one", "reward", _SUMMARY),
    _Described("train_seconds", "the sum of step_time, with checkpoints", "s", _SUMMARY),
    _Described("cpu_seconds", "the sum of cpu_seconds, with checkpoints", "s", _SUMMARY),
    _Described("sampled_tokens", "total/sampled_tokens of the last step", "tokens", _SUMMARY),
    _Described("faults", "faults by kind, over the whole run", "episodes", _SUMMARY),
)


def list_loss_metrics() -> Iterator[tuple[_Described, list[str]]]:
    """Yield what agentrl's own losses declare, each metric with the losses that have it."""
    owners: dict[_Described, list[str]] = {}
    for name, entry in list_own_entries("loss"):
        for metric, m in entry.metrics.items():
            described = _Described(metric, m.description, m.unit or "share", "agentrl/learner/losses/losses.py")
            owners.setdefault(described, []).append(name)
    yield from owners.items()


def find_metric(name: str, *, evaluation: bool = False) -> _Described | None:
    """Find the description of a name of metrics.jsonl; None for one that an environment or a plugin logged itself."""
    known = EVALUATION if evaluation else (*(d for d, _ in list_loss_metrics()), *STEP)
    exact = [d for d in known if d.name == name]
    return next(iter([*exact, *(d for d in known if d.matches(name))]), None)


def check_loss_metrics(loss: BoundEntry) -> None:
    """Raise ContractError if a loss declares a metric by a name that a run logs itself."""
    for name in loss.entry.metrics:
        if name.startswith("eval/") or any(d.matches(name) for d in STEP):
            raise ContractError(f"{loss.what} declares the metric {name!r}, which agentrl logs itself; rename it")


def format_page() -> str:
    """Format docs/metrics.md."""
    losses = [d._replace(formula=f"{d.formula} ({', '.join(names)})") for d, names in list_loss_metrics()]
    return "\n".join(
        [
            _INTRODUCTION,
            *_format_table(STEP),
            "",
            _LOSSES,
            *_format_table(losses),
            "",
            _EVALUATIONS,
            *_format_table(EVALUATION),
            "",
            _SUMMARIES,
            *_format_table(SUMMARY),
            "",
        ]
    )


def _format_table(metrics: tuple[_Described, ...] | list[_Described]) -> Iterator[str]:
    yield "| name | formula | unit | made in |"
    yield "|---|---|---|---|"
    for d in metrics:
        yield f"| `{d.name}` | {d.formula.replace('|', chr(92) + '|')} | {d.unit or '-'} | `{d.made}` |"


_INTRODUCTION = """\
# Metrics

Every number of `metrics.jsonl` and `summary.json`: its formula, its unit, and the module that makes it. A word in
capitals stands for a name. The page is written by `python -m agentrl.runs.metric_catalogue > docs/metrics.md`.

An episode that an infrastructure error ended is *not valid*: it is counted, and is in no number about the policy, but
for the floor in the rewards where it provoked the error itself ([faults](faults.md)). What
your rewards, environments, losses and `run.metrics` log stands beside these under the names they give.

## A line for each step
"""
_LOSSES = """\
## What the losses add

`agentrl list losses` shows them all. A ratio of rows (`learner.importance_level = "sequence"`) is counted once a row.
A loss of your own declares its metrics: `@agentrl.loss(metrics={"mine/share": "..."})`; `algorithm.json` has them.
"""
_EVALUATIONS = """\
## A line for each evaluation
"""
_SUMMARIES = """\
## `summary.json`
"""

if __name__ == "__main__":
    print(format_page(), end="")
