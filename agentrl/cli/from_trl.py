"""``agentrl from-trl``."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import UserError
from agentrl.migration.config_files import read_config_file
from agentrl.migration.document import format_plan
from agentrl.migration.functions import write_functions
from agentrl.migration.plan import Plan
from agentrl.migration.script import read_script
from agentrl.settings.section import Section

TEXT = """\
  agentrl from-trl train.py > train.toml             # then: agentrl train train.toml
  agentrl from-trl train.py --functions rewards.py   # reward functions and tools, out of a script that trains at once
  agentrl from-trl grpo.yaml accelerate.yaml         # of trl grpo --config, of accelerate launch
  agentrl from-trl train.py ds.json                  # of DeepSpeed

Reads a script that makes a GRPOTrainer, or its YAML, and prints the same training as TOML. Nothing is run: the script
is parsed. Comments say what a setting was called, what has no counterpart and what is left to do (TODO).
"""


class _FromTrlOptions(Section):
    functions: Path | None = Field(None, description="write the script's reward functions and tools into this file")


def _run(arguments: Arguments[_FromTrlOptions]) -> int:
    files = [Path(name) for name in arguments.names]
    if missing := [f for f in files if not f.is_file()]:
        raise UserError(f"no file {str(missing[0])!r} (from {Path.cwd()})")
    scripts = [f for f in files if f.suffix == ".py"]
    if len(scripts) > 1:
        raise UserError(f"agentrl from-trl reads one script at a time, not {' and '.join(map(str, scripts))}")
    plan = read_script(scripts[0]) if scripts else Plan(", ".join(map(str, files)))
    for file in (f for f in files if f not in scripts):
        read_config_file(file, plan)
    if arguments.options.functions is not None:
        _move_functions(plan, scripts, arguments.options.functions)
    print(format_plan(plan), end="")
    if plan.todo:
        count = len(dict.fromkeys(plan.todo))
        what = "one thing is" if count == 1 else f"{count} things are"
        print(f"agentrl: {what} left to do; the lines that begin with # TODO say what", file=sys.stderr)
    return 0


def _move_functions(plan: Plan, scripts: list[Path], file: Path) -> None:
    """Write the functions that the plan names into a file of their own, and name them there."""
    if not plan.functions:
        raise UserError("--functions: there are no functions of the script's own to write")
    write_functions(scripts[0], plan.functions, file)
    plan.move_functions(scripts[0], file)


COMMAND = Command("from-trl", "FILE... [--functions FILE.py]", TEXT, _run, _FromTrlOptions, names=(1, None))
