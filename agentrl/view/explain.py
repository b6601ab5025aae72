"""Explanations, in sentences, of the training of an episode or a token: its advantage, its ratio, its mask."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import fmean, stdev
from typing import Any

import numpy as np

from agentrl import credit
from agentrl.environments.task_sampler import describe_task
from agentrl.errors import UserError
from agentrl.runs.reader import EpisodeId, Row, parse_episode_id
from agentrl.settings.entries import fill_blanks
from agentrl.spread import center
from agentrl.types import Thread, ThreadRole
from agentrl.view import episode, importance_ratio
from agentrl.view.escaping import escape_controls
from agentrl.view.evaluation_findings import describe_step, find_scope
from agentrl.view.index import as_array
from agentrl.view.search import list_episodes
from agentrl.view.store import Store
from agentrl.view.threads import NOT_TRAINED, explain_thread, number_turns, read_threads
from agentrl.view.tokens import TokenTexts

AUTHORS = {
    "prompt": "the prompt: the template, the system's words, the task",
    "model": "the model",
    "env": "the environment: tools, observations, the template between turns",
}


def find_group(store: Store, where: EpisodeId) -> list[dict[str, Any]]:
    """Return the members of the episode's group, in order; empty if the index does not have it yet."""
    table = store.now.table
    steps, rows = as_array(table["step"]).to_numpy(), as_array(table["row"]).to_numpy()
    splits = as_array(table["split"])
    hits = [i for i in np.flatnonzero((steps == where.step) & (rows == where.row)) if splits[i].as_py() == where.split]
    if not hits:
        return []
    starts = np.flatnonzero(as_array(table["opens"]).to_numpy(zero_copy_only=False))
    own = int(np.searchsorted(starts, hits[0], side="right")) - 1
    end = starts[own + 1] if own + 1 < len(starts) else table.num_rows
    return list_episodes(table, np.arange(starts[own], end))


def describe_position(store: Store, row: Row, members: int = 0) -> list[str]:
    """Return an episode's step, or chunk of an evaluation; its task; and its number among the task's episodes."""
    scope = find_scope(store.folder)
    held_out = scope is not None or row["split"] != "train"
    trials = scope.sampled if scope else int(store.setting("eval.trials", 1))
    number = row["sample"]
    sample = f"sample {number}" + (f" of {members}" if members else "")
    if held_out:
        sample = "greedy" if number >= trials else f"trial {number + 1} of {trials}" if trials > 1 else "sampled"
    return [describe_step(store.folder, row["step"]), describe_task(row["task"], row["split"]), sample]


def explain_exclusion(store: Store, row: Row, group: Sequence[Row]) -> str:
    """Explain why no token of an episode was trained; empty if some were."""
    outcome = row["credit"]
    if outcome in (None, credit.TRAINED, credit.PROVOKED):
        return ""
    scored = [m for m in group if m["reward"] is not None]
    reasons = {
        credit.HELD_OUT: "it measures held-out tasks",
        credit.SERVED: "it is a conversation of a client, whom the policy was served to",
        credit.FAULT: f"an infrastructure error ended it ({row['fault']}), which says nothing about the model",
        credit.RESAMPLED: "its group taught nothing, or too few of it could be scored: another was rolled out for it",
        credit.UNSCORED: "no reward applied",
        credit.TOO_FEW: f"only {len(scored)} of the group's {len(group)} episodes could be scored, too few",
        credit.EMPTY: "the model sampled no token",
        credit.ZERO: _explain_zero(store, scored),
    }
    if outcome.startswith(credit.MASKED):
        return f"not trained: learner.mask_stop_reasons leaves out episodes that stop at {row['stop']}"
    return f"not trained: {reasons.get(outcome, escape_controls(outcome))}"


def _explain_zero(store: Store, scored: Sequence[Row]) -> str:
    """Explain an advantage of 0, and name the terms that act on the episode nevertheless."""
    terms = [f"learner.{name}" for name in ("beta", "entropy_coef") if store.setting(f"learner.{name}")]
    acted = f"; {' and '.join(terms)} acted on it as on every scored episode" if terms else ""
    if len(scored) > 1 and not any(center([m["reward"] for m in scored])):
        worth = f"{scored[0]['reward']:g}"
        return f"all {len(scored)} scored episodes of the group earned {worth}, so none was better{acted}"
    return f"its advantage is 0{acted}"


def explain_advantage(store: Store, row: Row, group: Sequence[Row]) -> str:
    """Explain the advantage of an episode by its group's rewards."""
    rewards = [m["reward"] for m in group if m["reward"] is not None]
    own, advantage = row["reward"], row["advantage"]
    if own is None or advantage is None or len(rewards) < 2:
        return f"advantage {_number(advantage)}"
    mean, std = fmean(rewards), stdev(rewards)
    spread = f"mean {mean:.3g}, standard deviation {std:.3g}"
    group_rewards = f"the group's {len(rewards)} rewards are {_list_values(rewards)}: {spread}"
    others = (sum(rewards) - own) / (len(rewards) - 1)
    rule = store.entry("advantage")
    line = fill_blanks(rule.explain, {"reward": own, "mean": mean, "std": std, "others": others}) or "a rule of its own"
    by_turn = ", ".join(f"{a:+.3g}" for a in row["advantages"])
    turns = f" (by turn: {by_turn})" if len(set(row["advantages"])) > 1 else ""
    how = f"= {line} ({rule.name})" if "{reward" in rule.explain else f"({rule.name}): {line}"
    return f"advantage {advantage:+.4g}{turns} {escape_controls(how)}; {group_rewards}"


def explain_episode(store: Store, name: str) -> list[str]:
    """Explain an episode in sentences. Raises UserError: there is no such one."""
    where = parse_episode_id(name)
    row = episode.read_episode(store, where)
    group = find_group(store, where)
    counts = {a: sum(s["length"] for s in episode.describe_segments(row) if s["author"] == a) for a in AUTHORS}
    weights = {w["name"]: w["value"] for w in row["weights"]}
    parts = ", ".join(_describe_component(r, weights.get(r["name"], 1.0)) for r in row["rewards"])
    sentences = [
        f"{where} of {store.name}: {', '.join(describe_position(store, row, len(group)))}",
        f"it stopped: {row['stop']}"
        + (f", {row['fault']}: {escape_controls(row['fault_message'] or '')}" if row["fault"] else ""),
        f"reward {_number(row['reward'])}" + (f" of {parts}" if parts else ""),
        *_explain_floor(row),
        explain_advantage(store, row, group),
        explain_exclusion(store, row, group)
        or f"trained: {counts['model']} tokens of the model, in {len(row['advantages'])} turns{_count_contexts(row)}",
        *_explain_threads(row),
        f"masked: {counts['prompt']} tokens of the prompt and {counts['env']} of the environment",
        *importance_ratio.explain_episode_ratios(row),
    ]
    return sentences + _describe_calls(row)


def _count_contexts(row: Row) -> str:
    count = sum(s["author"] == "prompt" for s in row["segments"])
    if row["threads"]:
        return f" of {count} threads, which count as one episode"
    return f" and {count} contexts: each begins with the history as the template writes it" if count > 1 else ""


def _explain_threads(row: Row) -> list[str]:
    """Explain where each thread of an episode comes from, and which one is not trained."""
    threads = read_threads(row)
    return [
        explain_thread(threads, number).removeprefix("in ") + ("" if thread.trained else "; not trained")
        for number, thread in enumerate(threads)
    ]


def _explain_floor(row: Row) -> list[str]:
    """Explain the reward of an episode that provoked its fault."""
    if row["fault"] is None or row["reward"] is None:
        return []
    return [
        "its own request provoked the fault: it earns the floor (each reward's lowest in the group, and no more than "
        "Env.worst_reward)"
    ]


def _describe_component(reward: Row, weight: float) -> str:
    factor = "" if weight == 1.0 or reward["value"] is None else f" x {weight:g}"
    return f"{escape_controls(reward['name'])} {_number(reward['value'])}{factor}"


def _describe_calls(row: Row) -> list[str]:
    lines, numbers = [], dict(enumerate(number_turns(read_threads(row))))
    for c in row["calls"]:
        name = escape_controls(c["name"]) or "(unreadable call)"
        turn = numbers.get(c["turn"], c["turn"]) + 1
        lines.append(f"turn {turn}: {name} {c['status']}, {c['seconds']:.3f} s")
    return lines


def explain_token(store: Store, texts: TokenTexts, name: str, number: int, row: Row | None = None) -> list[str]:
    """Explain a token of an episode in sentences.

    Args:
        number: the token's place in the episode, from 0.
        row: the episode, if it was read already.

    Raises:
        UserError: there is no such episode, or no such token in it.
    """
    where = parse_episode_id(name)
    row = row or episode.read_episode(store, where)
    group = find_group(store, where)
    parts = episode.describe_segments(row)
    total = sum(p["length"] for p in parts)
    hits = [(s, p) for s, p in zip(row["segments"], parts, strict=True) if 0 <= number - p["start"] < p["length"]]
    if not hits:
        raise UserError(f"the episode has the tokens 0 to {total - 1}, not {number}")
    (segment, part), at = hits[0], number - hits[0][1]["start"]
    text = escape_controls(episode.describe_tokens(row, texts, number, 1)["texts"][0], newlines=False)
    threads = read_threads(row)
    sentences = [
        f"token {number} of {total}: {text!r}, id {segment['token_ids'][at]}",
        _explain_author(part, threads),
        *([explain_thread(threads, part["thread"])] if threads else []),
    ]
    if segment["author"] != "model":
        is_side_call = threads and not threads[part["thread"]].trained
        return [*sentences, NOT_TRAINED if is_side_call else "masked: it is read and never learned from"]
    if segment["logprobs"] is None:
        return [*sentences, *_explain_demonstrated(store, row, segment, part, at)]
    version, logprob = segment["versions"][at], segment["logprobs"][at]
    age = _describe_age(store, row, version)
    sentences[1] += f", in turn {part['number'] + 1}, by version {version} of the policy{age}"
    if logprob is not None:
        sentences.append(f"logprob {logprob:.4g}: it was sampled with a probability of {exp(min(logprob, 0.0)):.3g}")
    if why := explain_exclusion(store, row, group):
        return [*sentences, why]
    weighting = importance_ratio.explain_token_ratio(store, segment, at, part["advantage"] or 0.0)
    trained = (
        [_explain_turn(part), *importance_ratio.explain_token_gradient(store, row, segment, at)]
        if weighting.trained
        else []
    )
    return [*sentences, *weighting.sentences, *trained, explain_advantage(store, row, group)]


def _explain_author(part: Row, threads: Sequence[Thread]) -> str:
    """Explain who wrote the tokens of a segment."""
    if not threads:
        again = f"the history, as the template writes it: context {part.get('context')} begins with it"
        return again if "context" in part else f"written by {AUTHORS[part['author']]}"
    thread = threads[part["thread"]]
    if part["author"] != "prompt" or thread.role is ThreadRole.MAIN:
        return f"written by {AUTHORS[part['author']]}"
    if not thread.trained:
        return "a side call's: its prompt, and what the model answered"
    own = thread.role is ThreadRole.SUB_AGENT
    return "its thread begins with it: " + (
        "the words that open it" if own else "the history, which is trained elsewhere"
    )


def _explain_demonstrated(store: Store, row: Row, segment: Row, part: Row, at: int) -> list[str]:
    """Explain a token that was not sampled: what the policy made of it before the step."""
    sentences = [f"demonstrated, in turn {part['number'] + 1}: no engine sampled it"]
    if segment.get("learner_logprobs") is None:
        return [*sentences, "not learned from"]
    logprob = segment["learner_logprobs"][at]
    sentences.append(f"the policy gave it a probability of {exp(min(logprob, 0.0)):.3g} before the step")
    return [*sentences, _explain_turn(part), *importance_ratio.explain_token_gradient(store, row, segment, at)]


def _explain_turn(part: Row) -> str:
    advantage = part["advantage"] or 0.0
    if advantage == 0.0:
        return "trained with advantage 0: this turn was as good as others"
    return f"trained with advantage {advantage:+.4g}: made {'more' if advantage > 0 else 'less'} likely"


def _describe_age(store: Store, row: Row, version: int) -> str:
    at = store.metrics.version_at(row["step"], row["split"])
    if at is None or row["split"] != "train":
        return ""
    return f" (learned from at version {at}: staleness {at - version})"


def _list_values(values: Sequence[float]) -> str:
    shown = " ".join(f"{v:.3g}" for v in values[:16])
    return shown if len(values) <= 16 else f"{shown} ..."


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
