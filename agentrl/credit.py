"""Credit, the ledger of a step: the advantage of each episode that was rolled out, or why it was not trained.

`assign_credit` computes it once. The learner's rows and denominators, the trajectory files, the metrics, ``explain``
and the page read it; none of them computes an advantage again.

    episodes of a step =  TRAINED                       an advantage other than 0, in a group learned from
                       +  ZERO        "zero advantage"  scored, and as good as its group
                       +  PROVOKED    "provoked fault"  its own request provoked an infrastructure error: trained
                                                        with the floor of the reward, an advantage other than 0
                       +  FAULT       "fault"           an infrastructure error of the world's ended it, in whatever
                                                        group
                       +  RESAMPLED   "resampled"       its group was rolled out again, with another task
                       +  UNSCORED    "no reward"       no reward applied
                       +  TOO_FEW     "too few scored"  its group has fewer scored members than ``min_group_size``
                       +  MASKED      "masked: REASON"  it stopped for a reason that ``mask_stop_reasons`` names
                       +  EMPTY       "nothing sampled" the model has sampled no token

Each episode has exactly one of them: the first that holds, in the order FAULT, RESAMPLED, UNSCORED, TOO_FEW, MASKED,
EMPTY, ZERO, PROVOKED, TRAINED. Held-out episodes have HELD_OUT, and belong to no step. So, over a run, episodes begun
are the sum of these counts, of the episodes still in flight, and of those that a group cancelled because it was full
(``rollout.oversample``), which are no trajectories.

Scored episodes of groups that are learned from are the rows of the denominators, as in TRL: those of zero advantage
with their tokens; masked and empty ones as rows without a token.

An episode that provoked its fault is compared as if it had answered that badly: its floor is in the group's mean. Left
out of it, the bad answers beside it would be further below the mean than it is, and faults would be learned after all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from statistics import fmean
from typing import TypeVar

from agentrl.types import AdvantageValue, Group, Sample, Stop, Trajectory

T = TypeVar("T")
TRAINED = "trained"
ZERO = "zero advantage"
PROVOKED = "provoked fault"
FAULT = "fault"
RESAMPLED = "resampled"
UNSCORED = "no reward"
TOO_FEW = "too few scored"
MASKED = "masked"  # stored with the stop reason: "masked: max_tokens"
EMPTY = "nothing sampled"
HELD_OUT = "held out"  # an evaluation's
SERVED = "served"  # a conversation of people's clients
OUTCOMES = (TRAINED, ZERO, PROVOKED, FAULT, RESAMPLED, UNSCORED, TOO_FEW, MASKED, EMPTY)

AdvantageRule = Callable[[Sequence[Sequence[Trajectory]]], Sequence[Sequence[AdvantageValue]]]  # groups to groups
Reduce = Callable[[Sequence[int]], Sequence[float]]  # trained tokens of each row to the weight of each row's tokens


@dataclass(frozen=True, slots=True)
class EpisodeCredit:
    """The credit of one episode.

    Args:
        outcome: TRAINED, or why it was not trained: one of ``OUTCOMES``, HELD_OUT or SERVED.
        advantage: of the episode, or of each of its turns; None where it has none: it was not compared with others.
        weight: of each of its trained tokens in the step's loss; None where it is no row of the denominators.
    """

    trajectory: Trajectory
    outcome: str
    advantage: AdvantageValue | None = None
    weight: float | None = None
    update: int = 0  # which of the batch's optimizer steps learns from it, from 0 on

    @property
    def trained_tokens(self) -> int:
        """Count the sampled tokens that are in the denominators: none of a masked episode."""
        return self.trajectory.sampled_tokens if self.outcome in (TRAINED, ZERO, PROVOKED) else 0

    @property
    def mean_advantage(self) -> float | None:
        """Average the turns' advantages, where each has its own."""
        if isinstance(self.advantage, tuple):
            return fmean(self.advantage) if self.advantage else None
        return self.advantage

    def turn_advantages(self) -> list[float | None]:
        """List the advantage of each turn."""
        return list(self.advantage) if isinstance(self.advantage, tuple) else [self.advantage] * self.trajectory.turns

    def sample(self) -> Sample:
        """Make the learner's row. A context ends with its last trained token; without one it is left out."""
        t = self.trajectory
        if not self.trained_tokens or self.advantage is None:
            return Sample([], [], [], [])
        mask, spans = t.loss_mask, _find_trained_contexts(t)
        advantages = iter(self.turn_advantages())
        turns = [(next(advantages) if s.author == "model" else None, len(s.token_ids)) for s in t.segments]
        by_token = [advantage or 0.0 for advantage, length in turns for _ in range(length)]
        kept = _cut(t.kept, spans) if any(s.kept for s in t.segments) else ()
        starts = (0, *accumulate(b - a for a, b in spans[:-1]))
        ids, logprobs = _cut(t.token_ids, spans), _cut(t.logprobs, spans)
        routed = tuple(
            (start + place - a, experts.take(0, b - place))
            for place, experts in t.routed_experts
            for start, (a, b) in zip(starts, spans, strict=True)
            if a <= place < b
        )
        return Sample(ids, _cut(mask, spans), logprobs, _cut(by_token, spans), kept, starts, routed)


@dataclass(frozen=True, slots=True)
class Credit:
    """The ledger of a step: an entry for each member of each group that was rolled out for it.

    Args:
        groups: those that are learned from, or were to be; then those that were resampled.
        learned: the groups that are learned from: enough of their members are scored.
    """

    groups: tuple[Group, ...]
    entries: tuple[tuple[EpisodeCredit, ...], ...]  # groups, members
    learned: tuple[Group, ...] = ()

    def __iter__(self) -> Iterator[EpisodeCredit]:
        return chain.from_iterable(self.entries)

    @property
    def rows(self) -> list[EpisodeCredit]:
        """List the entries that are rows of the denominators, in order."""
        return [e for e in self if e.weight is not None]

    def samples(self) -> list[Sample]:
        """Make the learner's rows, one for each of ``rows``."""
        return [e.sample() for e in self.rows]

    def weights(self) -> list[float]:
        """List the weight of each token of each of ``rows``."""
        return [e.weight for e in self.rows if e.weight is not None]

    def updates(self) -> list[int]:
        """List the optimizer step of the batch that each of ``rows`` belongs to."""
        return [e.update for e in self.rows]

    def counts(self) -> dict[str, int]:
        """Count the episodes by outcome; masked ones together. The counts sum to all episodes."""
        counts = Counter(e.outcome.partition(":")[0] for e in self)
        return {outcome: counts[outcome] for outcome in OUTCOMES}


@dataclass(frozen=True, slots=True)
class BatchCut:
    """The cut of a batch into optimizer steps, as TRL makes it: rows in random order, as even as their number allows.

    Args:
        updates: optimizer steps, each with rows of its own.
        seed: of the order.
        own_denominator: a loss divides by the tokens of each optimizer step (bnpo). Others divide by an optimizer
            step's share of the batch's denominator, so that their sum does not depend on the cut.
    """

    updates: int = 1
    seed: str = ""
    own_denominator: bool = False

    def assign(self, rows: int) -> list[int]:
        """Return the optimizer step of each of so many rows."""
        if self.updates == 1:
            return [0] * rows
        order = random.Random(self.seed).sample(range(rows), rows)
        update = dict(zip(order, (place * self.updates // rows for place in range(rows)), strict=True))
        return [update[row] for row in range(rows)]

    def weigh(self, lengths: Sequence[int], updates: Sequence[int], reduce: Reduce) -> list[float]:
        """Return the weight of each row's tokens in the loss of its optimizer step."""
        if not self.own_denominator:
            return [self.updates * weight for weight in reduce(lengths)]
        own = [iter(reduce([n for n, u in zip(lengths, updates, strict=True) if u == k])) for k in range(self.updates)]
        return [next(own[update]) for update in updates]


def _weigh_alike(lengths: Sequence[int]) -> list[float]:
    return [1.0 / max(sum(lengths), 1)] * len(lengths)


def assign_credit(
    groups: Sequence[Group],
    rule: AdvantageRule,
    *,
    reduce: Reduce = _weigh_alike,
    mask_stop_reasons: frozenset[Stop] = frozenset(),
    min_group_size: int = 2,
    resampled: Sequence[Group] = (),
    cut: BatchCut = BatchCut(),
) -> Credit:
    """Compute the credit of a step's episodes.

    Args:
        groups: what the step learns from; those with fewer scored members than ``min_group_size`` are left out.
        rule: of the members of all groups learned from that no fault of the world's ended, to advantages.
        reduce: of trained tokens a row, 0 for a masked one, to weights of tokens: the loss's reduction. By default all
            tokens of the step weigh alike, and sum to 1.
        mask_stop_reasons: episodes that stopped for one of these reasons count in the statistics, but are not trained.
        resampled: groups that were rolled out for this step and replaced.
        cut: of the rows into optimizer steps.
    """
    learned = tuple(g for g in groups if len(g.scored) >= min_group_size)
    advantages = iter(rule([[t for t in g if not t.is_lost] for g in learned]))
    drafts = []
    for group in groups:
        own = iter(next(advantages) if len(group.scored) >= min_group_size else ())
        drafts.append([_assign_outcome(t, None if t.is_lost else next(own, None), mask_stop_reasons) for t in group])
    lengths = [e.trained_tokens for own in drafts for e in own if e.advantage is not None]
    updates = cut.assign(len(lengths))
    places = zip(cut.weigh(lengths, updates, reduce), updates, strict=True)
    entries = [tuple(e if e.advantage is None else _place(e, *next(places)) for e in own) for own in drafts]
    entries += [tuple(EpisodeCredit(t, FAULT if t.is_lost else RESAMPLED) for t in g) for g in resampled]
    return Credit((*groups, *resampled), tuple(entries), learned)


def _place(entry: EpisodeCredit, weight: float, update: int) -> EpisodeCredit:
    return replace(entry, weight=weight, update=update)


def _assign_outcome(
    t: Trajectory, advantage: AdvantageValue | None, mask_stop_reasons: frozenset[Stop]
) -> EpisodeCredit:
    """Name the outcome of an episode whose group was not resampled: the first that holds."""
    if t.is_lost:
        return EpisodeCredit(t, FAULT)
    if t.reward is None or advantage is None:
        return EpisodeCredit(t, UNSCORED if t.reward is None else TOO_FEW)
    if t.stop in mask_stop_reasons and t.fault is None:
        return EpisodeCredit(t, f"{MASKED}: {t.stop.value}", advantage)
    if not t.sampled_tokens:
        return EpisodeCredit(t, EMPTY, advantage)
    teaches = any(advantage) if isinstance(advantage, tuple) else bool(advantage)
    return EpisodeCredit(t, ZERO if not teaches else PROVOKED if t.fault else TRAINED, advantage)


def _find_trained_contexts(t: Trajectory) -> list[tuple[int, int]]:
    """Find the contexts of an episode that hold trained tokens: from where to behind the last of these."""
    at, spans = 0, []
    for context in t.contexts:
        ends = list(accumulate((len(s.token_ids) for s in context), initial=at))[1:]
        trained = [end for s, end in zip(context, ends, strict=True) if s.author == "model" and s.token_ids]
        spans += [(at, trained[-1])] if trained else []
        at = ends[-1]
    return spans


def _cut(values: Sequence[T], spans: Sequence[tuple[int, int]]) -> list[T]:
    return [value for a, b in spans for value in values[a:b]]


def record_held_out(groups: Iterable[Group]) -> Credit:
    """Make the record of an evaluation: nothing in it is learned from."""
    evaluated = tuple(groups)
    return Credit(evaluated, tuple(tuple(EpisodeCredit(t, HELD_OUT) for t in g) for g in evaluated))


def record_served(conversations: Iterable[Trajectory]) -> Credit:
    """Make the record of conversations with a policy that is served: nobody scores them."""
    groups = tuple(Group(t.task, (t,)) for t in conversations)
    return Credit(groups, tuple((EpisodeCredit(t, SERVED),) for g in groups for t in g))
