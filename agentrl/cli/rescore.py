"""``agentrl rescore``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from agentrl import stored
from agentrl.cli import past
from agentrl.cli.settings import spec_of
from agentrl.config import TrainConfig
from agentrl.env import EnvSpec
from agentrl.errors import UserError
from agentrl.rescoring import Rescored, rescored
from agentrl.rewards import Reward, functions
from agentrl.stored import Place
from agentrl.types import Trajectory
from agentrl.view.text import visible

HELP = """usage: agentrl rescore RUN [--rewards NAME,NAME] [--env.SETTING VALUE ...] [--split NAME] [--out FILE]

  agentrl rescore runs/last                                 # by the environment as it is now
  agentrl rescore runs/last --env.rewards math,length       # env prompts, other rewards
  agentrl rescore runs/last --rewards my_rewards.py:polite  # any environment: functions in TRL's form

Nothing is played and nothing is trained: stored episodes are scored anew, and what changes is shown. Episodes that the
world failed are left out.

  --rewards NAMES  reward functions instead of the environment's own score; they are given prompts and completions as
                   messages, completion_ids, and what the task's reset told in info
  --split NAME     of train and test; both by default
  --act true       replies are given to the environment again, tools and all: for a score about the state it is in
  --out FILE       a Parquet file with a row an episode [RUN/rescored/DATE-TIME.parquet]
"""
OWN: dict[str, Any] = {"rewards": None, "split": None, "act": False, "out": None}
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


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    run = past.folder(words[0])
    config, own = past.settings(run, words[1:], OWN)
    splits = [own["split"]] if own["split"] else []
    files = stored.files(run, splits)
    config, used = _functions(config, own["rewards"])
    out = Path(own["out"] or _unused(run / "rescored"))
    if out.exists():
        raise UserError(f"{str(out)!r} is there already; give another --out")
    console = Console()
    found = anyio.run(_all, spec_of(config), files, used, own["act"], console)
    _write(out, found)
    _show(console, run, found)
    console.print(f"\nepisode by episode: {out}", style="dim", markup=False, highlight=False)
    return 0


def _unused(folder: Path) -> Path:
    """A file of this second, or of the next one where that is taken."""
    now = time.time()
    while (path := folder / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}.parquet").exists():
        now += 1
    return path


def _functions(config: TrainConfig, rewards: str | None) -> tuple[TrainConfig, Mapping[str, Reward] | None]:
    if rewards is None:
        return config, None
    names = [name.strip() for name in str(rewards).split(",")]
    if config.env["name"] == "prompts":  # which knows the columns of its rows
        return config.model_copy(update={"env": {**config.env, "rewards": names}}), None
    return config, functions(names)


def _groups(files: Sequence[tuple[str, int, Path]]) -> Iterator[list[tuple[Place, Trajectory]]]:
    """Yield the episodes of a training's group together, as members count up; those of an evaluation one by one."""
    for split, step, path in files:
        group: list[tuple[Place, Trajectory]] = []
        before = -1
        for number, row in enumerate(stored.rows(path)):
            if group and (split != "train" or row["task"] != group[0][1].task or row["member"] <= before):
                yield group
                group = []
            group.append((Place(split, step, number), stored.trajectory(row)))
            before = row["member"]
        if group:
            yield group


async def _all(
    spec: EnvSpec,
    files: Sequence[tuple[str, int, Path]],
    used: Mapping[str, Reward] | None,
    act: bool,
    console: Console,
) -> list[Rescored]:
    found = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("scoring", total=None)
        async with spec.open():
            async for one in rescored(spec, _groups(files), used, act=act):
                found.append(one)
                progress.advance(bar)
    return sorted(found, key=lambda r: (r.where.split != "train", r.where))


def _write(out: Path, found: Sequence[Rescored]) -> None:
    rows = [
        {
            **r.where._asdict(),
            "task": r.before.task,
            "reward_before": r.before.reward,
            "reward": r.reward,
            "rewards": [{"name": n, "value": v} for n, v in (r.rewards or {}).items()],
            "why": r.why or None,
        }
        for r in found
    ]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), out)
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror or error}") from None


def _show(console: Console, run: Path, found: Sequence[Rescored]) -> None:
    by_name: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for r in found:
        for place, parts in ((0, r.before.rewards), (1, r.rewards or {})):
            for name, value in parts.items():
                if value is not None:
                    by_name[name][place].append(value)
        if r.reward is not None and r.before.reward is not None:
            by_name["(all)"][0].append(r.before.reward)
            by_name["(all)"][1].append(r.reward)
    table = Table("reward", "then", "now", box=None, header_style="bold")
    for name, (then, now) in sorted(by_name.items()):
        table.add_row(Text(visible(name)), f"{fmean(then):.3f}" if then else "-", f"{fmean(now):.3f}" if now else "-")
    failed = [r for r in found if r.rewards is None]
    other = sum(r.reward != r.before.reward for r in found if r.rewards is not None)
    console.print(f"{len(found)} episodes of {run}: {other} are worth something else", markup=False, highlight=False)
    console.print(table)
    if failed:
        why = visible(failed[0].why)
        console.print(f"{len(failed)} could not be scored, such as {failed[0].where}: {why}", markup=False)
