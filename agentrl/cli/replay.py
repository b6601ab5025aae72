"""``agentrl replay``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console

from agentrl import stored
from agentrl.cli import past
from agentrl.cli.settings import loading, spec_of
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation_scope import read_scope
from agentrl.renderer import Renderer
from agentrl.renderer.chat import ChatRenderer
from agentrl.replay import RecordedEngine, Replay, replayed
from agentrl.rollout import Rollout
from agentrl.stored import Place
from agentrl.types import Trajectory
from agentrl.view.text import visible

HELP = """usage: agentrl replay RUN EPISODE [--from_turn K [--model MODEL] [--greedy true]] [--live false]

  agentrl replay runs/last train-3:17                # the same tokens, tools and reward?
  agentrl replay runs/last 3:17 --from_turn 1        # from its turn 1 (from 0) the trained model goes on
  agentrl replay runs/last 3:17 --from_turn 1 --model Qwen/Qwen3-0.6B

The model's turns, and what tools said, are taken from the record; the task is reset anew. A tool that is asked what it
was not asked then is called. `agentrl view` shows the names of episodes.

  --from_turn K  the model's turns from K on are sampled anew
  --model MODEL  by this model; the run's own by default
  --greedy true  its likeliest tokens
  --live false   a tool that would have to be called ends the episode instead
"""
OWN: dict[str, Any] = {"from_turn": None, "model": None, "greedy": False, "live": True}


def main(words: Sequence[str]) -> int:
    if len(words) < 2 or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    run, where = past.folder(words[0]), stored.place(words[1])
    config, own = past.settings(run, words[2:], OWN)
    before = stored.trajectory(stored.row(run, where))
    turns = own["from_turn"]
    if turns is not None and not (isinstance(turns, int) and 0 <= turns <= before.turns):
        raise ConfigError(f"--from_turn is 0 to {before.turns}, the turns of {where}; not {turns!r}")
    if turns is None and (own["model"] is not None or own["greedy"]):
        raise ConfigError("--model and --greedy are for --from_turn K, from where on something is sampled")
    console = Console()
    with loading(console):
        import agentrl.session  # noqa: F401  brings torch
    found = anyio.run(_play, config, run, where, before, own)
    _show(console, where, found)
    return 0


async def _play(config: TrainConfig, run: Path, where: Place, before: Trajectory, own: dict[str, Any]) -> Replay:
    from agentrl import policy
    from agentrl.renderer.template import TemplateRenderer
    from agentrl.session import opened

    scope = read_scope(run)
    asked = scope is not None and bool(scope.endpoint)
    if asked and own["from_turn"] is not None:
        raise UserError(f"{where} was played by a server: no model here can go on from it; leave --from_turn out")
    model = own["model"] or (str(run) if (run / "model").is_dir() else config.model)
    spec, turns = spec_of(config), own["from_turn"]
    async with AsyncExitStack() as held:
        if turns is not None:
            session = await held.enter_async_context(opened(config.model_copy(update={"model": model}), spec))
            rollout = session.rollout(where.split)
            if own["greedy"]:
                rollout.sampling = replace(rollout.sampling, temperature=0.0)
            return await replayed(rollout, before, turns=turns, live=own["live"], then=session.engine)
        await held.enter_async_context(spec.open())
        renderer: Renderer = ChatRenderer()
        if not asked:
            template = policy.read_template(config.chat_template)
            renderer = TemplateRenderer(policy.load_tokenizer(model), template, policy.load_end_tokens(model))
        nobody = RecordedEngine(before, 0, None)
        rollout = Rollout.configured(config.rollout, spec, nobody, renderer, where.split)
        return await replayed(rollout, before, live=own["live"])


def _show(console: Console, where: Place, found: Replay) -> None:
    for message in found.after.messages:
        console.print(message["role"], style="bold", end="  ")
        text = message["content"]
        for call in message.get("tool_calls") or ():
            text += f"\n  -> {call['function']['name']}({call['function']['arguments']})"
        console.print(visible(text), markup=False, highlight=False)
    then, now = (dict(t.rewards) for t in (found.before, found.after))
    console.print(f"\n{where}: reward {found.before.reward} {then} then, {found.after.reward} {now} now", markup=False)
    if found.after.fault is not None:
        console.print(f"it ended by a fault: {visible(found.after.fault.message)}", markup=False)
    if found.called:
        console.print(f"{found.called} calls of tools were made, which are not on record")
    console.print(visible(found.differs or "the same, token by token"), markup=False)
