"""Where the commands and snippets of the documentation run: the files that they name, and a small run."""

from __future__ import annotations

import importlib.metadata
import shutil
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import agentrl
from agentrl import templates
from agentrl.cli import main
from tests.helpers import pages

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {
    "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 64},
    "eval": {"every": 0, "final_tasks": 2},
}


def laid_out(folder: Path) -> Path:
    """The files that pages name, those that they show, and what commands before them would have made."""
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__*"))
    shutil.copytree(pages.ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__*"))
    for page in pages.PAGES:
        for fence in pages.fences(page):
            if fence.file:
                (folder / fence.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / fence.file).write_text(fence.text, encoding="utf-8")
    with sqlite3.connect(folder / "shop.db") as database:
        database.execute("CREATE TABLE prices (thing TEXT, price INTEGER)")
        database.execute("INSERT INTO prices VALUES ('hat', 7)")
    database.close()
    columns = ("--id_column", "key", "--title_column", "name", "--text_column", "body")
    assert main(["index", str(folder / "wiki.jsonl"), "--out", str(folder / "wiki.db"), *columns]) == 0
    return folder


def plugins(folder: Path) -> list[str]:
    """What `agentrl new` writes, as it is when installed: places for the path of modules."""
    places = []
    known = {e.name for e in importlib.metadata.entry_points(group="agentrl.envs")}
    for kind, name in (("env", "crates"), ("tool", "weather-report")):
        assert name not in known, f"{name} is installed: the pages' own is not what would run"
        made = templates.write_package(kind, name, folder / f"agentrl-{name}")  # type: ignore[arg-type]
        project = tomllib.loads((made / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        places += [str(made / "src"), installed(made / "site", project)]
    [metadata] = [f.text for f in pages.fences(pages.ROOT / "docs/extend.md") if f.language == "toml"]
    return [*places, str(folder), installed(folder / "site", tomllib.loads(metadata)["project"])]


def installed(site: Path, project: dict[str, Any]) -> str:
    """A place for the path of modules, with a package's metadata, as it is when it is installed."""
    info = site / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    groups = project["entry-points"].items()
    entries = (f"[{g}]\n" + "".join(f"{n} = {v}\n" for n, v in e.items()) for g, e in groups)
    (info / "entry_points.txt").write_text("".join(entries))
    return str(site)


def small_run(name: str, env: str, **own: object) -> None:
    """``runs/NAME`` of the working folder: one step."""
    agentrl.train(env, env_args=own, steps=1, run={"dir": f"runs/{name}"}, **SMALL)


def small_evaluation(name: str) -> None:
    """``evals/NAME`` of the working folder: two tasks, twice each."""
    agentrl.evaluate("math-tools", "nano", tasks=2, trials=2, out=f"evals/{name}", rollout={"max_tokens": 64})


def point_last() -> None:
    """``runs/last`` is ``runs/mine`` again."""
    last = Path("runs/last")
    last.unlink(missing_ok=True)
    last.symlink_to("mine")
