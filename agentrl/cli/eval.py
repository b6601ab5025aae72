"""``agentrl eval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentrl.cli import settings
from agentrl.cli.figures import describe_lost, format_mean, format_share
from agentrl.cli.settings import loading
from agentrl.cli.words import check_settings, flags_told
from agentrl.config import Section, TrainConfig
from agentrl.errors import ConfigError
from agentrl.evaluation import Listener, check_key, choose_policy, pin_model, run_evaluation
from agentrl.evaluation_folder import EvaluationFolder
from agentrl.evaluation_scope import Scope, check_heeded, check_split, heeds, read_scope
from agentrl.folder import Unwritable
from agentrl.layers import Layer, build, flatten, read_toml
from agentrl.measurement import Evaluation
from agentrl.policy import configured
from agentrl.types import Trajectory

HELP = """usage: agentrl eval --env NAME --model MODEL [--trials 1] [--tasks 256] [--out DIR] [--SETTING VALUE ...]

  agentrl eval --env math-tools --model runs/last
  agentrl eval --env math-tools --model runs/last --trials 8 --out evals/a    # pass@k and pass^k
  agentrl eval --env math-tools --model runs/last --first 100000 --tasks 512
  agentrl eval --env math-tools --endpoint http://127.0.0.1:8000/v1 --model NAME
  agentrl eval --resume evals/a                                              # goes on where it was killed

Each task is sampled as in training, as often as --trials says, and played once greedily. Every episode is kept in a run
folder: agentrl view, explain, rescore, replay, report and compare open it. The same command again, or --resume, plays
what is missing there.
"""
SHORT = {"trials": "eval.trials", "pass_at": "eval.pass_at"}


class Own(Section):
    """An evaluation's subject, and where it is kept."""

    tasks: int = Field(256, ge=1, description="how many tasks [256]")
    first: int = Field(0, ge=0, description="the first task [0]")
    split: str = Field("test", description="which tasks: test or train [test]")
    greedy: bool = Field(True, description="whether each task is played greedily too [true]")
    out: str | None = Field(None, description="the folder [evals/DATE-TIME-ENV]")
    resume: str | None = Field(None, description="the folder of an evaluation that goes on, with its own settings")
    retry_faults: bool = Field(False, description="whether tasks with an infrastructure fault are played again [false]")
    endpoint: str | None = Field(None, description="URL of a server that speaks OpenAI's chat completions")
    key_env: str = Field("OPENAI_API_KEY", description="the variable that holds the endpoint's key [OPENAI_API_KEY]")


class Bar(Listener):
    """A progress bar over the episodes."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.console, self.folder = console, ""
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.bar = self.progress.add_task(str(config.env["name"]), total=None)

    def started(self, folder: EvaluationFolder, episodes: int, missing: int) -> None:
        self.folder = str(folder.path)
        self.progress.update(self.bar, total=episodes, completed=episodes - missing)
        if not missing:
            say(self.console, f"{folder.path} is complete: nothing is played")
        elif missing < episodes:
            say(self.console, f"{episodes - missing:,} of {episodes:,} episodes are in {folder.path} already")

    def ended(self, trajectory: Trajectory) -> None:
        self.progress.advance(self.bar)

    def said(self, text: str) -> None:
        say(self.console, text)


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(f"{HELP}\n{flags_told(Own)}\n\nsettings [default]:\n{settings.help_text(partial(heeds, Scope()))}")
        print("\n--trials and --pass_at are short for --eval.trials and --eval.pass_at")
        return 0
    own, scope, layers = _read(words)
    config = build(*layers) if scope.endpoint else configured(*layers)
    config = pin_model(config, scope, any("model" in given for _, given in layers))
    if not own.resume:
        scope = scope._replace(sampled=config.eval.trials)
    spec, console = settings.spec_of(config), Console()
    if not scope.endpoint:
        with loading(console):
            import agentrl.session  # noqa: F401  brings torch
    bar = Bar(console, config)
    playing = choose_policy(config, spec, scope, key_env=own.key_env)
    try:
        with bar.progress:
            evaluate = partial(run_evaluation, out=own.resume or own.out, retry_faults=own.retry_faults, listener=bar)
            found, folder = anyio.run(evaluate, config, spec, scope, playing)
    except (KeyboardInterrupt, Unwritable):
        if bar.folder:
            say(console, f"what has ended is in {bar.folder}; to go on: agentrl eval --resume {bar.folder}")
        raise
    _show(console, folder, found)
    return 0


def _read(words: Sequence[str]) -> tuple[Own, Scope, list[Layer]]:
    """Part the words into the verb's own, what is evaluated, and the settings."""
    *files, (source, given) = settings.layers(words)
    own = check_settings({n: v for n, v in given.items() if n in Own.model_fields}, Own)
    check_split(own.split, "--split")
    rest = _written_out({n: v for n, v in given.items() if n not in Own.model_fields})
    before = _resumed(own)
    changes = {n: v for n, v in own.model_dump(exclude_unset=True).items() if n in Scope._fields}
    scope = (before or Scope(tasks=own.tasks))._replace(**changes)
    check_key(own.key_env, scope.endpoint, "--key_env")
    check_heeded(list(flatten(rest)), scope, _option)
    if own.resume:
        files.append(read_toml(Path(own.resume) / "config.toml"))
    return own, scope, [*files, (source, rest)]


def _written_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """Write short names out: ``--trials 4`` is ``--eval.trials 4``."""
    for name, full in SHORT.items():
        if name in given and full.partition(".")[2] in given.get("eval", {}):
            raise ConfigError(f"--{name} and --{full} are the same setting; give one of them")
    short = {SHORT[name].partition(".")[2]: value for name, value in given.items() if name in SHORT}
    rest = {name: value for name, value in given.items() if name not in SHORT}
    return rest | {"eval": {**rest.get("eval", {}), **short}} if short else rest


def _option(name: str) -> str:
    return "--" + next((short for short, full in SHORT.items() if full == name), name)


def _resumed(own: Own) -> Scope | None:
    """Read what the evaluation to go on with evaluates. Raises ConfigError where there is none."""
    if own.resume is None:
        return None
    if own.out is not None:
        raise ConfigError("--resume is the folder, and so is --out; give one of them")
    found = read_scope(Path(own.resume))
    if found is None:
        raise ConfigError(f"--resume: there is no evaluation in {own.resume!r} (from {Path.cwd()}); no evaluation.toml")
    return found


def _show(console: Console, folder: EvaluationFolder, found: Evaluation) -> None:
    config, scope = folder.config, folder.scope
    trials = f", {scope.sampled} trials each" if scope.sampled > 1 else ""
    asked = f" at {scope.endpoint}" if scope.endpoint and scope.endpoint != config.model else ""
    tasks = f"tasks {scope.first} to {scope.first + scope.tasks - 1} of split {scope.split}{trials}"
    say(console, f"{config.env['name']}, {config.model}{asked}, {tasks}")
    columns = "", "reward (95 % interval)", "calls/episode", "valid calls", "turns", "faults"
    table = Table(*columns, box=None, header_style="bold")
    for name, m in found.parts:
        shares = f"{m.calls:.2f}", format_share(m.valid_calls), f"{m.turns:.2f}", str(m.faults)
        table.add_row(name, format_mean(m.estimate), *shares)
    console.print(table)
    if found.sampled and scope.sampled > 1:
        console.print(_passes(found, config))
    for text in describe_lost([m for _, m in found.parts]):
        say(console, text)
    say(console, f"\nkept in {folder.path}: agentrl view {folder.path}")


def _passes(found: Evaluation, config: TrainConfig) -> Table:
    """Make a table with a row for each number of trials."""
    rates = found.sampled.passes if found.sampled else ()
    table = Table("k", "pass@k (one passes)", "pass^k (all pass)", "tasks", box=None, header_style="bold")
    table.title = f"\na trial passes from reward {config.eval.pass_at:g} on"
    table.title_justify, table.title_style = "left", "dim"
    for rate in rates:
        table.add_row(str(rate.k), format_mean(rate.any), format_mean(rate.all), str(rate.any.tasks))
    return table


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
