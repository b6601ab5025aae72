"""``agentrl rescore``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from agentrl.cli.arguments import Arguments, Command, find_run_folder
from agentrl.cli.output import Console, print_line
from agentrl.environments.spec import EnvSpec
from agentrl.errors import UserError
from agentrl.rewards.functions import Reward, resolve_rewards
from agentrl.rewards.trainer_state import TrainerState
from agentrl.runs import reader
from agentrl.runs.reader import EpisodeId
from agentrl.runs.rescore import RescoredEpisode, read_states, rescore_episodes
from agentrl.settings.loader import build_config
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.settings.trust import read_run_layer
from agentrl.types import Trajectory
from agentrl.view.escaping import escape_controls

TEXT = """\
  agentrl rescore runs/last                                 # by the environment as it is now
  agentrl rescore runs/last --env.rewards math,length       # env prompts, other rewards
  agentrl rescore runs/last --rewards my_rewards.py:polite  # any environment: functions in TRL's form

Nothing is rolled out and nothing is trained: stored episodes are scored again, and what changes is shown. Episodes that
ended in an infrastructure fault are left out. Reward functions get prompts and completions as messages, completion_ids,
and what the task's reset put into info.
"""


class _RescoreOptions(Section):
    rewards: str | None = Field(
        None, description="reward functions instead of the environment's own score; commas between them"
    )
    split: str | None = Field(None, description="train or test; both by default")
    act: bool = Field(
        False, description="give the replies to the environment again, tools and all: for a score about its state"
    )
    out: Path | None = Field(
        None, description="a Parquet file with a row an episode; RUN/rescored/DATE-TIME.parquet by default"
    )
    trust: bool = Field(
        False, description="follow settings of the folder that load code, start programs or connect; it is remembered"
    )


SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("step", pa.int32()),
        ("row", pa.int32()),
        ("task", pa.int64()),
        ("reward_before", pa.float64()),
        ("reward", pa.float64()),  # null: it could not be scored
        ("rewards", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ("why", pa.string()),  # it could not
    ]
)


def _run(arguments: Arguments[_RescoreOptions]) -> int:
    run, own = find_run_folder(arguments.names[0]), arguments.options
    files = reader.list_files(run, [own.split] if own.split else [])
    config = build_config(read_run_layer(run, arguments.settings[1], trust=own.trust), arguments.settings)
    files = _leave_out_others(files, config)
    config, rewards = _choose_rewards(config, own.rewards)
    out = own.out or _choose_file(run / "rescored")
    if out.exists():
        raise UserError(f"{str(out)!r} is there already; give another --out")
    console = Console()
    damaged: list[str] = []
    groups = _groups(files, damaged)
    episodes = anyio.run(
        _rescore, EnvSpec.from_config(config), groups, rewards, own.act, read_states(run, config), console
    )
    _write(out, episodes)
    _print_changes(console, run, episodes)
    if damaged:
        print_line(console, f"{len(damaged)} damaged episodes are left out, such as {damaged[0]}")
    console.print(f"\nepisode by episode: {out}", style="dim", markup=False, highlight=False)
    return 0


def _leave_out_others(files: Sequence[tuple[str, int, Path]], config: TrainConfig) -> list[tuple[str, int, Path]]:
    """Leave out the files of evaluation sets, and of stages, whose environment is not the run's.

    Raises:
        UserError: nothing else is there.
    """
    ends = list(accumulate(stage.steps for stage in config.stages))
    others = [range(end - s.steps + 1, end + 1) for end, s in zip(ends, config.stages, strict=True) if s.env]
    left = [
        file
        for file in files
        if file[0] not in config.eval.sets and not (file[0] == "train" and any(file[1] in steps for steps in others))
    ]
    if not left:
        raise UserError("these episodes are of eval.sets or stages whose environment is not the run's: not rescored")
    return left


def _choose_file(folder: Path) -> Path:
    """Return a file named by this second, or by the next one that is free."""
    now = time.time()
    while (path := folder / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}.parquet").exists():
        now += 1
    return path


def _choose_rewards(config: TrainConfig, rewards: str | None) -> tuple[TrainConfig, Mapping[str, Reward] | None]:
    if rewards is None:
        return config, None
    names = [name.strip() for name in rewards.split(",")]
    if config.env["name"] == "prompts":  # which knows the columns of its rows
        return config.model_copy(update={"env": {**config.env, "rewards": names}}), None
    return config, resolve_rewards(names)


def _groups(files: Sequence[tuple[str, int, Path]], damaged: list[str]) -> Iterator[list[tuple[EpisodeId, Trajectory]]]:
    """Yield the episodes of a training's group together, as members count up; those of an evaluation one by one.

    Args:
        damaged: takes the name of each episode that cannot be read, and why.
    """
    for split, step, path in files:
        group: list[tuple[EpisodeId, Trajectory]] = []
        before, left_out = -1, dict[int, str]()
        for number, row in reader.read_rows(path, left_out=left_out):
            try:
                trajectory = reader.build_trajectory(row)
            except UserError as error:
                left_out[number] = str(error)
                continue
            if group and (split != "train" or row["task"] != group[0][1].task or row["sample"] <= before):
                yield group
                group = []
            group.append((EpisodeId(split, step, number), trajectory))
            before = row["sample"]
        if group:
            yield group
        damaged += [f"{EpisodeId(split, step, number)}: {why}" for number, why in sorted(left_out.items())]


async def _rescore(
    spec: EnvSpec,
    groups: Iterator[list[tuple[EpisodeId, Trajectory]]],
    rewards: Mapping[str, Reward] | None,
    act: bool,
    state_at: Callable[[EpisodeId], TrainerState],
    console: Console,
) -> list[RescoredEpisode]:
    episodes = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("scoring", total=None)
        async with spec.open():
            async for episode in rescore_episodes(spec, groups, rewards, act=act, state_at=state_at):
                episodes.append(episode)
                progress.advance(bar)
    return sorted(episodes, key=lambda r: (r.where.split != "train", r.where))


def _write(out: Path, episodes: Sequence[RescoredEpisode]) -> None:
    rows = [
        {
            **r.where._asdict(),
            "task": r.before.task,
            "reward_before": r.before.reward,
            "reward": r.reward,
            "rewards": [{"name": n, "value": v} for n, v in (r.rewards or {}).items()],
            "why": r.why or None,
        }
        for r in episodes
    ]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), out)
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror or error}") from None


def _print_changes(console: Console, run: Path, episodes: Sequence[RescoredEpisode]) -> None:
    by_name: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for r in episodes:
        for place, parts in ((0, r.before.rewards), (1, r.rewards or {})):
            for name, value in parts.items():
                if value is not None:
                    by_name[name][place].append(value)
        if r.reward is not None and r.before.reward is not None:
            by_name["(all)"][0].append(r.before.reward)
            by_name["(all)"][1].append(r.reward)
    table = Table("reward", "then", "now", box=None, header_style="bold")
    for name, (then, now) in sorted(by_name.items()):
        table.add_row(
            Text(escape_controls(name)), f"{fmean(then):.3f}" if then else "-", f"{fmean(now):.3f}" if now else "-"
        )
    failed = [r for r in episodes if r.rewards is None]
    other = sum(r.reward != r.before.reward for r in episodes if r.rewards is not None)
    console.print(f"{len(episodes)} episodes of {run}: {other} are worth something else", markup=False, highlight=False)
    console.print(table)
    if failed:
        why = escape_controls(failed[0].why)
        console.print(f"{len(failed)} could not be scored, such as {failed[0].where}: {why}", markup=False)


COMMAND = Command(
    "rescore",
    "RUN [--rewards NAME,NAME] [--env.SETTING VALUE ...] [--split NAME] [--out FILE]",
    TEXT,
    _run,
    _RescoreOptions,
    names=(1, 1),
    settings=lambda name: False,
    footer="Any setting of the run may be given over what its config.toml has: --env.SETTING VALUE",
)
