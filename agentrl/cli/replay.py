"""``agentrl replay``."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from pydantic import Field

from agentrl.cli.arguments import Arguments, Command, find_run_folder
from agentrl.cli.output import Console, show_loading
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.scope import read_scope
from agentrl.evaluation.sets import find_set
from agentrl.renderer import Renderer
from agentrl.renderer.json_lines import ChatRenderer
from agentrl.rollout.rollout import Rollout
from agentrl.runs import reader
from agentrl.runs.reader import EpisodeId
from agentrl.runs.replay import RecordedEngine, Replay, replay_episode
from agentrl.settings.evaluation import EvalConfig
from agentrl.settings.loader import build_config
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.settings.trust import read_run_layer
from agentrl.training.stages import build_stages, find_stage
from agentrl.types import ThreadRole, Trajectory
from agentrl.view.escaping import escape_controls

TEXT = """\
  agentrl replay runs/last train-3:17                # the same tokens, tools and reward?
  agentrl replay runs/last 3:17 --from_turn 1        # from its turn 1 (from 0) the trained model continues
  agentrl replay runs/last 3:17 --from_turn 1 --model Qwen/Qwen3-0.6B

The model's turns and the tools' results are taken from the record; the task is reset again. A tool that gets a call
which is not on record is called. `agentrl view` shows the names of episodes. One that an agent played (`--agent`)
cannot be replayed, as its program decides what is asked; nor can one that has sub-agents (`--tools spawn`).
"""


class _ReplayOptions(Section):
    from_turn: int | None = Field(None, ge=0, description="sample the model's turns from this one on")
    model: str | None = Field(None, description="the model that samples them; the run's own by default")
    greedy: bool = Field(False, description="take its likeliest tokens")
    live: bool = Field(True, description="false: a tool that would have to be called ends the episode instead")
    trust: bool = Field(
        False, description="follow settings of the folder that load code, start programs or connect; it is remembered"
    )


def _run(arguments: Arguments[_ReplayOptions]) -> int:
    run, where = find_run_folder(arguments.names[0]), reader.parse_episode_id(arguments.names[1])
    own, given = arguments.options, arguments.settings
    config = build_config(read_run_layer(run, given[1], trust=own.trust), given)
    if config.agent is not None:
        raise UserError(
            f"{where} was played by the agent {config.agent!r}, whose program decides what is asked and cannot be set "
            f"back to a record: agentrl rescore {run} scores it again, agentrl explain {run} {where} and agentrl view "
            "show it"
        )
    before = reader.build_trajectory(reader.read_row(run, where))
    if any(thread.role is ThreadRole.SUB_AGENT for thread in before.threads):
        raise UserError(
            f"{where} has sub-agents, which take their turns at the same time: agentrl rescore {run} scores it again, "
            f"agentrl explain {run} {where} and agentrl view show it"
        )
    if own.from_turn is not None and own.from_turn > before.turns:
        raise ConfigError(f"--from_turn is 0 to {before.turns}, the turns of {where}; not {own.from_turn}")
    if own.from_turn is None and (own.model is not None or own.greedy):
        raise ConfigError("--model and --greedy are for --from_turn K, from where on something is sampled")
    console = Console()
    with show_loading(console):
        import agentrl.resources  # noqa: F401  brings torch
    replay = anyio.run(_replay, config, run, where, before, own)
    _print_replay(console, where, replay)
    return 0


async def _replay(config: TrainConfig, run: Path, where: EpisodeId, before: Trajectory, own: _ReplayOptions) -> Replay:
    from agentrl.models import policy
    from agentrl.models.call_formats import build_call_format
    from agentrl.renderer.template import TemplateRenderer
    from agentrl.resources import open_resources

    scope = read_scope(run)
    by_server = scope is not None and bool(scope.endpoint)
    if by_server and own.from_turn is not None:
        raise UserError(f"{where} was sampled by a server: no model here can continue it; leave --from_turn out")
    model = own.model or (str(run) if (run / "model").is_dir() else config.model)
    spec, turns = EnvSpec.from_config(config), own.from_turn
    spec, split = find_set(config, spec, where.split)
    spec = find_stage(build_stages(config, spec), where.step).spec if split == "train" else spec
    load = config.load if model == config.model else config.load.model_copy(update={"revision": None})
    config = config.model_copy(
        update={"eval": EvalConfig(), "model": model, "load": load}
    )  # no evaluation set is opened
    async with AsyncExitStack() as held:
        if turns is not None:
            session = await held.enter_async_context(open_resources(config, spec))
            rollout = session.rollout(split)
            if own.greedy:
                rollout.sampling = rollout.sampling.greedy()
            return await replay_episode(rollout, before, turns=turns, live=own.live, then=session.engine)
        await held.enter_async_context(spec.open())
        renderer: Renderer = ChatRenderer(config.template_words)
        if not by_server:
            tokenizer = policy.load_tokenizer(model, load)
            template = policy.find_template(tokenizer, config.chat_template)
            calls = build_call_format(config.call_format)
            ends = policy.load_end_tokens(model, load)
            words = config.template_words
            renderer = TemplateRenderer(tokenizer, template, ends, calls, words, config.history)
        nobody = RecordedEngine(before, 0, None)
        rollout = Rollout.from_config(config.rollout, spec, nobody, renderer, split)
        return await replay_episode(rollout, before, live=own.live)


def _print_replay(console: Console, where: EpisodeId, replay: Replay) -> None:
    for message in replay.after.messages:
        console.print(message["role"], style="bold", end="  ")
        text = message["content"]
        for call in message.get("tool_calls") or ():
            text += f"\n  -> {call['function']['name']}({call['function']['arguments']})"
        console.print(escape_controls(text), markup=False, highlight=False)
    then, now = (dict(t.rewards) for t in (replay.before, replay.after))
    console.print(
        f"\n{where}: reward {replay.before.reward} {then} then, {replay.after.reward} {now} now", markup=False
    )
    if replay.after.fault is not None:
        console.print(f"it ended by a fault: {escape_controls(replay.after.fault.message)}", markup=False)
    if replay.called:
        console.print(f"{replay.called} tool calls were made that are not on record")
    console.print(escape_controls(replay.differs or "the same, token by token"), markup=False)


COMMAND = Command(
    "replay",
    "RUN EPISODE [--from_turn K [--model MODEL] [--greedy]] [--live false]",
    TEXT,
    _run,
    _ReplayOptions,
    names=(2, 2),
    settings=lambda name: False,
)
