"""``agentrl eval``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from pydantic import Field
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentrl.cli.arguments import Arguments, Command
from agentrl.cli.output import Console, print_line, show_loading
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError
from agentrl.evaluation.evaluate import EvaluationListener, check_key, open_policy, pin_model, run_evaluation
from agentrl.evaluation.folder import EvaluationFolder
from agentrl.evaluation.measurement import Evaluation
from agentrl.evaluation.scope import EvaluationScope, check_settings_used, check_split, is_setting_used, read_scope
from agentrl.library.figures import describe_lost_episodes, format_mean, format_share
from agentrl.models.policy import build_model_config
from agentrl.runs.atomic import FolderWriteError
from agentrl.settings.loader import Layer, build_config, flatten
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.settings.trust import read_run_layer
from agentrl.types import Trajectory

TEXT = """\
  agentrl eval --env math-tools --model runs/last
  agentrl eval --env math-tools --model runs/last --trials 8 --out evals/a    # pass@k and pass^k
  agentrl eval --env math-tools --model runs/last --first 100000 --tasks 512
  agentrl eval --env math-tools --endpoint http://127.0.0.1:8000/v1 --model NAME
  agentrl eval --resume evals/a                                              # resumes where it was killed

Each task is rolled out as in training, as often as --trials says, and once greedily. Every episode is kept in a run
folder: agentrl view, explain, rescore, replay, report and compare open it. The same command again, or --resume, adds
what is missing there.
"""
SHORT = {"trials": "eval.trials", "pass_at": "eval.pass_at"}


class _EvalOptions(Section):
    tasks: int = Field(256, ge=1, description="tasks to evaluate on")
    first: int = Field(0, ge=0, description="the first task")
    split: str = Field("test", description="the split of the tasks: test or train")
    greedy: bool = Field(True, description="roll each task out greedily too")
    out: str | None = Field(None, description="the folder; evals/DATE-TIME-ENV by default")
    resume: str | None = Field(None, description="the folder of an evaluation to resume, with its own settings")
    retry_faults: bool = Field(False, description="roll tasks with an infrastructure fault out again")
    trust: bool = Field(
        False, description="follow settings of the folder that load code, start programs or connect; it is remembered"
    )
    endpoint: str | None = Field(None, description="URL of a server that speaks OpenAI's chat completions")
    key_env: str = Field("OPENAI_API_KEY", description="the environment variable that holds the endpoint's key")


class _ProgressBar(EvaluationListener):
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
            print_line(self.console, f"{folder.path} is complete: there is nothing to roll out")
        elif missing < episodes:
            print_line(self.console, f"{episodes - missing:,} of {episodes:,} episodes are in {folder.path} already")

    def ended(self, trajectory: Trajectory) -> None:
        self.progress.advance(self.bar)

    def said(self, text: str) -> None:
        print_line(self.console, text)


def _run(arguments: Arguments[_EvalOptions]) -> int:
    own, (scope, layers) = arguments.options, _read(arguments)
    config = build_config(*layers) if scope.endpoint else build_model_config(*layers)
    config = pin_model(config, scope, any("model" in given for _, given in layers))
    if not own.resume:
        scope = scope._replace(sampled=config.eval.trials)
    spec, console = EnvSpec.from_config(config), Console()
    check_split(spec, scope.split, "--split")
    if not scope.endpoint:
        with show_loading(console):
            import agentrl.resources  # noqa: F401  brings torch
    bar = _ProgressBar(console, config)
    policy = open_policy(config, spec, scope, key_env=own.key_env)
    try:
        with bar.progress:
            evaluate = partial(run_evaluation, out=own.resume or own.out, retry_faults=own.retry_faults, listener=bar)
            evaluation, folder = anyio.run(evaluate, config, spec, scope, policy)
    except (KeyboardInterrupt, FolderWriteError):
        if bar.folder:
            print_line(console, f"what has ended is in {bar.folder}; to resume: agentrl eval --resume {bar.folder}")
        raise
    _print_evaluation(console, folder, evaluation)
    return 0


def _read(arguments: Arguments[_EvalOptions]) -> tuple[EvaluationScope, list[Layer]]:
    """Return what is evaluated, and the settings. Raises ConfigError for a setting that would do nothing."""
    own, (source, given) = arguments.options, arguments.settings
    settings = _expand_short_names(given)
    changes = {n: v for n, v in own.model_dump(exclude_unset=True).items() if n in EvaluationScope._fields}
    scope = (_read_resumed(own) or EvaluationScope(tasks=own.tasks))._replace(**changes)
    check_key("key_env" in own.model_fields_set, scope.endpoint, "--key_env")
    check_settings_used(list(flatten(settings)), scope, _format_option)
    if own.trust and not own.resume:
        raise ConfigError("--trust is for --resume, whose folder has settings; what you give here is your own")
    resumed = [read_run_layer(Path(own.resume), settings, trust=own.trust)] if own.resume else []
    return scope, [*arguments.files, *resumed, (source, settings)]


def _expand_short_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Write short names out: ``--trials 4`` is ``--eval.trials 4``."""
    for name, full in SHORT.items():
        if name in given and full.partition(".")[2] in given.get("eval", {}):
            raise ConfigError(f"--{name} and --{full} are the same setting; give one of them")
    short = {SHORT[name].partition(".")[2]: value for name, value in given.items() if name in SHORT}
    rest = {name: value for name, value in given.items() if name not in SHORT}
    return rest | {"eval": {**rest.get("eval", {}), **short}} if short else rest


def _format_option(name: str) -> str:
    return "--" + next((short for short, full in SHORT.items() if full == name), name)


def _read_resumed(own: _EvalOptions) -> EvaluationScope | None:
    """Read what the evaluation to resume evaluates. Raises ConfigError if there is none."""
    if own.resume is None:
        return None
    if own.out is not None:
        raise ConfigError("--resume is the folder, and so is --out; give one of them")
    scope = read_scope(Path(own.resume))
    if scope is None:
        raise ConfigError(f"--resume: there is no evaluation in {own.resume!r} (from {Path.cwd()}); no evaluation.toml")
    return scope


def _print_evaluation(console: Console, folder: EvaluationFolder, evaluation: Evaluation) -> None:
    config, scope = folder.config, folder.scope
    trials = f", {scope.sampled} trials each" if scope.sampled > 1 else ""
    server = f" at {scope.endpoint}" if scope.endpoint and scope.endpoint != config.model else ""
    tasks = f"tasks {scope.first} to {scope.first + scope.tasks - 1} of split {scope.split}{trials}"
    print_line(console, f"{config.env['name']}, {config.model}{server}, {tasks}")
    columns = "", "reward (95 % interval)", "calls/episode", "failed calls", "turns", "faults"
    table = Table(*columns, box=None, header_style="bold")
    for name, m in evaluation.parts:
        shares = f"{m.calls:.2f}", format_share(m.failed_calls), f"{m.turns:.2f}", str(m.faults)
        table.add_row(name, format_mean(m.estimate), *shares)
    console.print(table)
    if evaluation.sampled and scope.sampled > 1:
        console.print(_build_pass_table(evaluation, config))
    for text in describe_lost_episodes([m for _, m in evaluation.parts]):
        print_line(console, text)
    print_line(console, f"\nkept in {folder.path}: agentrl view {folder.path}")


def _build_pass_table(evaluation: Evaluation, config: TrainConfig) -> Table:
    """Make a table with a row for each number of trials."""
    rates = evaluation.sampled.passes if evaluation.sampled else ()
    table = Table("k", "pass@k (one passes)", "pass^k (all pass)", "tasks", box=None, header_style="bold")
    table.title = f"\na trial passes from reward {config.eval.pass_at:g} on"
    table.title_justify, table.title_style = "left", "dim"
    for rate in rates:
        table.add_row(str(rate.k), format_mean(rate.any), format_mean(rate.all), str(rate.any.tasks))
    return table


COMMAND = Command(
    "eval",
    "--env NAME --model MODEL [--trials 1] [--tasks 256] [--out DIR] [--SETTING VALUE ...]",
    TEXT,
    _run,
    _EvalOptions,
    settings=partial(is_setting_used, EvaluationScope()),
    footer="--trials and --pass_at are short for --eval.trials and --eval.pass_at",
)
