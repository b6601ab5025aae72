"""The verbs of the command line, and what runs them. Only here does the process exit."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint

from agentrl.cli.output import print_traceback, silence_when_closed
from agentrl.errors import Interrupted, UserError, suggest
from agentrl.runtime.interruption import raise_signals_as_interrupts
from agentrl.runtime.parent_watch import OWNER, end_with_parent
from agentrl.settings import registry
from agentrl.view.escaping import escape_controls

VERBS = {  # each one's module is named as the verb, and has its `Command` as COMMAND
    "train": "train a model on an environment",
    "sft": "fine-tune a model on demonstrations, as a warm start",
    "eval": "evaluate a model on an environment's held-out tasks",
    "compare": "compare evaluations task by task, with paired intervals",
    "plan": "plan a training on GPUs: memory, time, how to divide them",
    "serve": "start a vLLM server for --engine server",
    "player": "roll out groups for a run, on any machine",
    "serve-policy": "serve a policy to any client, every conversation recorded",
    "serve-tools": "serve tools to any MCP client",
    "rescore": "score a run's stored episodes again, offline",
    "replay": "play a stored episode again, from its record",
    "view": "look at runs in a browser, also while they go on",
    "report": "write a run as one HTML file to share",
    "explain": "explain why an episode or a token was trained as it was",
    "list": "list the environments, tools, rewards and models there are",
    "export": "write a trained model as a plain one, adapters merged",
    "check": "check an environment, a tool, or a model's chat template",
    "from-trl": "translate a training script or configuration of TRL's",
    "new": "write a package with an environment or a tool of your own",
    "play": "take the model's turns yourself, or display a model play",
}
FOOTER = "\n\nagentrl VERB --help tells more. Begin with: agentrl train --env math-tools"
Run = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    It is 0, 2 for a user's mistake, 75 where another process of the run was lost, or 128 + n after signal n (Ctrl-C
    130, SIGTERM 143).
    """
    sys.excepthook = print_traceback
    with silence_when_closed(), raise_signals_as_interrupts() as came:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        except UserError as error:
            print(f"agentrl: {escape_controls(str(error))}", file=sys.stderr)
            return error.exit_status
        except KeyboardInterrupt as error:
            by = error.signal if isinstance(error, Interrupted) else (came or [signal.SIGINT])[0]
            print("agentrl: interrupted" + f" by {by.name}" * (by != signal.SIGINT), file=sys.stderr)
            return 128 + by


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_format_usage() + FOOTER)
        return 0
    if words[0] in ("--version", "-V"):
        from agentrl import __version__

        print(f"agentrl {__version__}")
        return 0
    _quiet_threads()
    if OWNER in os.environ:  # a launcher has started this process
        end_with_parent()
    return _find_command(words[0])(words[1:])


def _format_usage() -> str:
    """List the verbs here, and those that packages add under the entry-point group ``agentrl.commands``."""
    entries = registry.list_registered("command")
    verbs = VERBS | {name: _summarize(name, entry) for name, entry in entries.items() if name not in VERBS}
    lines = "\n".join(f"  {name:<11} {summary}" for name, summary in verbs.items())
    return f"usage: agentrl {{{','.join(verbs)}}} ...\n\n{lines}"


def _summarize(name: str, entry: EntryPoint) -> str:
    """Return a package's own words on its command; the package's name if it has none."""
    try:
        command = registry.load_registered("command", name)
        text = getattr(command, "summary", "") or inspect.getdoc(command) or ""
    except Exception:  # a package that does not even import is no reason to withhold the help
        text = ""
    first = text.partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:] or f"from {entry.dist.name if entry.dist else entry.value}"


def _find_command(verb: str) -> Run:
    """Return what runs a verb, given the words after it. Raises UserError if there is no such verb."""
    command: Run
    if verb in VERBS:
        command = importlib.import_module(f"agentrl.cli.{verb.replace('-', '_')}").COMMAND
        return command
    added = registry.list_registered("command")
    if verb not in added:
        raise UserError(f"no command {verb!r}{suggest(verb, [*VERBS, *added])}")
    command = registry.load_registered("command", verb)
    return command


def _quiet_threads() -> None:
    """Let idle OpenMP threads sleep instead of spinning on a core that others need; before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
