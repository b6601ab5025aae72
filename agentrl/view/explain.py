"""Why an episode or a token was trained as it was, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, isclose
from statistics import fmean, stdev
from typing import Any

import numpy as np

from agentrl import credit
from agentrl.errors import UserError
from agentrl.spread import center
from agentrl.stored import Place, Row, place
from agentrl.view import episode, ratio
from agentrl.view.index import one
from agentrl.view.search import page
from agentrl.view.store import Store
from agentrl.view.text import visible
from agentrl.view.tokens import Texts

EPS = 1e-4  # added to a standard deviation, as the learner does
AUTHORS = {
    "prompt": "the prompt: the template, the system's words, the task",
    "model": "the model",
    "world": "the world: tools, the environment, the template between turns",
}
IN_WORDS = {
    "batch": "its distance from the group's mean, divided by the standard deviation of all rewards of the step",
    "gdpo": "each part of the reward normalised in the group, their weighted sum normalised over the step",
    "rebn": "each turn's return, normalised over all turns of the group",
    "first_turn": "each turn's return, normalised by the group's returns at the first turn",
    "gigpo": "GRPO's advantage of the episode, plus that of the turn among turns that answered the same observation",
}


def _grpo(own: float, rewards: Sequence[float]) -> tuple[float, str]:
    mean, std = fmean(rewards), stdev(rewards)
    return (own - mean) / (std + EPS), f"({own:g} - {mean:.4g}) / ({std:.4g} + {EPS:g})"


def _dr_grpo(own: float, rewards: Sequence[float]) -> tuple[float, str]:
    return own - fmean(rewards), f"{own:g} - {fmean(rewards):.4g}"


def _rloo(own: float, rewards: Sequence[float]) -> tuple[float, str]:
    others = (sum(rewards) - own) / (len(rewards) - 1)
    return own - others, f"{own:g} - {others:.4g}, the mean of the others"


# Of an episode's reward and its group's to the advantage, and how it comes about; compared with the learner's in
# tests/test_gradient.py.
FORMULAS: dict[str, Callable[[float, Sequence[float]], tuple[float, str]]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}


def group_of(store: Store, where: Place) -> list[dict[str, Any]]:
    """The members of the episode's group, in order; empty where the index does not have it yet."""
    table = store.now.table
    steps, rows = one(table["step"]).to_numpy(), one(table["row"]).to_numpy()
    splits = one(table["split"])
    hits = [i for i in np.flatnonzero((steps == where.step) & (rows == where.row)) if splits[i].as_py() == where.split]
    if not hits:
        return []
    starts = np.flatnonzero(one(table["opens"]).to_numpy(zero_copy_only=False))
    own = int(np.searchsorted(starts, hits[0], side="right")) - 1
    end = starts[own + 1] if own + 1 < len(starts) else table.num_rows
    return page(table, np.arange(starts[own], end))


def why_not_trained(store: Store, row: Row, group: Sequence[Row]) -> str:
    """Explain why no token of an episode was learned from; empty where some were."""
    outcome = row.get("credit") or _outcome_of_older_run(store, row, group)
    if outcome == credit.TRAINED:
        return ""
    scored = [m for m in group if m["reward"] is not None and m["fault"] is None]
    reasons = {
        credit.HELD_OUT: "it measures held-out tasks",
        credit.FAULT: f"the world failed ({row['fault']}), which says nothing about the model",
        credit.RESAMPLED: "its group taught nothing, or too few of it could be scored: another was rolled out for it",
        credit.UNSCORED: "no reward applied",
        credit.TOO_FEW: f"only {len(scored)} of the group's {len(group)} episodes could be scored, too few",
        credit.EMPTY: "the model sampled no token",
        credit.ZERO: _zero(store, scored),
    }
    if outcome.startswith(credit.MASKED):
        return f"not trained: learner.mask_stops leaves out episodes that stop at {row['stop']}"
    return f"not trained: {reasons.get(outcome, visible(outcome))}"


def _zero(store: Store, scored: Sequence[Row]) -> str:
    """Explain an advantage of 0, and what acts on the episode nevertheless."""
    terms = [f"learner.{name}" for name in ("beta", "entropy_coef") if store.setting(f"learner.{name}")]
    acted = f"; {' and '.join(terms)} acted on it as on every scored episode" if terms else ""
    if len(scored) > 1 and not any(center([m["reward"] for m in scored])):
        worth = f"{scored[0]['reward']:g}"
        return f"all {len(scored)} scored episodes of the group earned {worth}, so none was better{acted}"
    return f"its advantage is 0{acted}"


def _outcome_of_older_run(store: Store, row: Row, group: Sequence[Row]) -> str:
    """Derive the outcome that schema version 2 and older did not store."""
    scored = [m for m in group if m["reward"] is not None and m["fault"] is None]
    if row["split"] != "train" or row["fault"] or row["reward"] is None:
        return credit.HELD_OUT if row["split"] != "train" else credit.FAULT if row["fault"] else credit.UNSCORED
    if group and len(scored) < int(store.setting("rollout.min_group", 2)):
        return credit.TOO_FEW
    if row["stop"] in store.setting("learner.mask_stops", []):
        return credit.MASKED
    return credit.TRAINED if any(row["advantages"] or [row["advantage"]]) else credit.ZERO


def where_from(store: Store, row: Row, group: Sequence[Row]) -> str:
    """Where an episode's advantage comes from."""
    name = str(store.setting("learner.advantage", "grpo"))
    rewards = [m["reward"] for m in group if m["reward"] is not None and m["fault"] is None]
    own, advantage = row["reward"], row["advantage"]
    if own is None or advantage is None or len(rewards) < 2:
        return f"advantage {_number(advantage)}"
    mean, std = fmean(rewards), stdev(rewards)
    others = f"the group's {len(rewards)} rewards are {_listed(rewards)}: mean {mean:.3g}, standard deviation {std:.3g}"
    if name in FORMULAS:
        value, text = FORMULAS[name](own, rewards)
        if isclose(value, advantage, rel_tol=1e-3, abs_tol=1e-6):
            return f"advantage {advantage:+.4g} = {text} ({name}); {others}"
        return f"advantage {advantage:+.4g} is stored, though {name} gives {text} = {value:+.4g}; {others}"
    by_turn = ", ".join(f"{a:+.3g}" for a in row["advantages"])
    turns = f" (by turn: {by_turn})" if len(set(row["advantages"])) > 1 else ""
    return f"advantage {advantage:+.4g}{turns} ({name}): {IN_WORDS.get(name, 'a rule of its own')}; {others}"


def of_episode(store: Store, name: str) -> list[str]:
    """Sentences about an episode. Raises UserError: there is no such one."""
    where = place(name)
    row = episode.read(store, where)
    group = group_of(store, where)
    counts = {a: sum(s["length"] for s in episode.segments(row) if s["author"] == a) for a in AUTHORS}
    weights = {w["name"]: w["value"] for w in row["weights"]}
    parts = ", ".join(_part(r, weights.get(r["name"], 1.0)) for r in row["rewards"])
    said = [
        f"{where.split}-{where.step}:{where.row} of {store.name}: step {row['step']}, task {row['task']}, "
        f"member {row['member']} of {len(group) or '?'}",
        f"it stopped: {row['stop']}"
        + (f", {row['fault']}: {visible(row['fault_message'] or '')}" if row["fault"] else ""),
        f"reward {_number(row['reward'])}" + (f" of {parts}" if parts else ""),
        where_from(store, row, group),
        why_not_trained(store, row, group)
        or f"trained: {counts['model']} tokens of the model, in {len(row['advantages'])} turns",
        f"masked: {counts['prompt']} tokens of the prompt and {counts['world']} of the world",
        *ratio.of_episode(row),
    ]
    return said + _tools(row)


def _part(reward: Row, weight: float) -> str:
    weighed = "" if weight == 1.0 or reward["value"] is None else f" x {weight:g}"
    return f"{visible(reward['name'])} {_number(reward['value'])}{weighed}"


def _tools(row: Row) -> list[str]:
    lines = []
    for c in row["calls"]:
        lines.append(
            f"turn {c['turn'] + 1}: {visible(c['name']) or '(unreadable call)'} {c['status']}, {c['seconds']:.3f} s"
        )
    return lines


def of_token(store: Store, texts: Texts, name: str, number: int) -> list[str]:
    """Sentences about a token, by its place in the episode, from 0. Raises UserError: there is no such one."""
    where = place(name)
    row = episode.read(store, where)
    return token_told(store, texts, row, group_of(store, where), number)


def token_told(store: Store, texts: Texts, row: Row, group: Sequence[Row], number: int) -> list[str]:
    parts = episode.segments(row)
    total = sum(p["length"] for p in parts)
    found = [(s, p) for s, p in zip(row["segments"], parts, strict=True) if 0 <= number - p["start"] < p["length"]]
    if not found:
        raise UserError(f"the episode has the tokens 0 to {total - 1}, not {number}")
    (segment, part), at = found[0], number - found[0][1]["start"]
    one_token = episode.tokens(row, texts, number, 1)
    said = [
        f"token {number} of {total}: {visible(one_token['texts'][0], newlines=False)!r}, id {segment['token_ids'][at]}",
        f"written by {AUTHORS[segment['author']]}",
    ]
    if segment["author"] != "model":
        return [*said, "masked: it is read and never learned from"]
    version, logprob = segment["versions"][at], segment["logprobs"][at]
    said[1] += f", in turn {part['turn'] + 1}, by version {version} of the policy{_age(store, row, version)}"
    if logprob is not None:
        said.append(f"logprob {logprob:.4g}: it was sampled with a probability of {exp(min(logprob, 0.0)):.3g}")
    if why := why_not_trained(store, row, group):
        return [*said, why]
    weighed = ratio.of_token(store, row, segment, at, part["advantage"] or 0.0)
    turns = [p for p in parts if p["author"] == "model"]
    trained = [_turn_trained(part), *ratio.slope_of(store, row, turns, number)] if weighed.trained else []
    return [*said, *weighed.said, *trained, where_from(store, row, group)]


def _turn_trained(part: Row) -> str:
    advantage = part["advantage"] or 0.0
    if advantage == 0.0:
        return "trained with advantage 0: this turn was as good as others"
    return f"trained with advantage {advantage:+.4g}: made {'more' if advantage > 0 else 'less'} likely"


def _age(store: Store, row: Row, version: int) -> str:
    at = store.curves.version_at(row["step"], row["split"])
    if at is None or row["split"] != "train":
        return ""
    return f" (learned from at version {at}: staleness {at - version})"


def _listed(values: Sequence[float]) -> str:
    shown = " ".join(f"{v:.3g}" for v in values[:16])
    return shown if len(values) <= 16 else f"{shown} ..."


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
