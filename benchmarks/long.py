"""Run the benchmarks that take long, and keep what they print: python benchmarks/long.py [NAME ...]

Each writes ``benchmarks/results/NAME.txt``: the commit it measured, the command, the machine, the minutes it took, what
was printed, and the exit status. Commit the file. A tree with changes that no commit has is told in it.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
_TESTS = ["-m", "pytest", "-n", "2", "-q", "tests", "-m"]
QUICK = [*_TESTS, "not slow and not vllm and not browser"]
STAGES = {  # of CI, with the tests that are long; else as they are there, so without ENVIRONMENT
    "slow": [*_TESTS, "slow and not vllm and not browser"],
    "vllm": [*_TESTS, "vllm"],
}
COMMANDS: dict[str, list[str]] = {  # add yours here: what python is given
    **STAGES,
    "kills": ["benchmarks/kills.py", "--kills", "50"],
    "kills-ahead": ["benchmarks/kills.py", "--kills", "50", "--staleness", "2"],
    "endings": ["benchmarks/kills.py", "--endings"],
    "seeds": ["-m", "pytest", "-q", "-s", "-m", "slow", "tests/test_learning.py", "tests/library/test_rollouts.py"],
    "episodes": ["-m", "pytest", "-q", "-m", "slow", "tests/test_storm.py", "-k", "many_thousand"],
    "strangers": ["-m", "pytest", "-n", "2", "-m", "slow", "tests/cli/test_strangers.py"],
    "templates": ["-m", "pytest", "-q", "-s", "-m", "slow", "tests/renderer/call_formats/test_corpus.py"],
    "warm-starts": ["benchmarks/warm_starts.py"],
    "folded-contexts": ["benchmarks/folded_contexts.py"],
    "families": ["-m", "pytest", "-n", "2", "-q", "-m", "slow", "tests/models/test_causal_lms.py"],
    "sharding": ["-m", "pytest", "-q", "-s", "-m", "slow", "tests/learner/test_sharding.py"],
    "rank-kills": ["-m", "pytest", "-q", "-s", "-m", "slow", "tests/learner/test_rank_kills.py"],
    "histories": ["-m", "pytest", "-n", "2", "-q", "-s", "tests/gateway/test_histories.py"],
    "agents": ["-m", "pytest", "-q", "-m", "slow", "tests/agents/test_field.py"],  # `make long` makes their venv
    "killed-agents": ["-m", "pytest", "-q", "-s", "-m", "slow", "tests/gateway/test_killed_agents.py"],
    "players": ["benchmarks/players.py", "storm"],
    "row-exchange": ["benchmarks/row_exchange.py"],
    "versions-low": QUICK,
    "versions-high": QUICK,
    "mutated-calls": ["-m", "pytest", "-q", "-s", "-m", "slow", "tests/renderer/call_formats/test_mutations.py"],
}
PYTHONS = {  # made by `make versions` and `make vllm`
    **{f"versions-{end}": f".venv-versions/{end}/bin/python" for end in ("low", "high")},
    "vllm": ".venv-vllm/bin/python",
}
ENVIRONMENT = {  # what the tests leave out
    "AGENTRL_AGENTS_PYTHON": str(HERE.parent / ".venv-agents/bin/python"),
    "AGENTRL_EVERY_VERB": "1",
    "AGENTRL_EVERY_CASE": "1",
    "AGENTRL_RANK_KILLS": "25",
    "AGENTRL_MUTATED_CALLS": "100000",
    "AGENTRL_EPISODES": "100000",
    "AGENTRL_HISTORIES": "10000",
    "AGENTRL_KILLED_EPISODES": "1000",
    "AGENTRL_SEEDS": "5",
}


def measured_commit() -> str:
    """Return the commit of the tree, and whether the tree has changes beside it."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", ":!benchmarks/results")
    return commit + (" with changes that are not committed" if changes else "")


def measure(name: str) -> int:
    """Run one benchmark and write its file; return its exit status."""
    commit, begun = measured_commit(), time.monotonic()
    pipe, environment = subprocess.PIPE, {**os.environ, **({} if name in STAGES else ENVIRONMENT)}
    command = [PYTHONS.get(name, sys.executable), *COMMANDS[name]]
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    head = {
        "commit": commit,
        "command": f"python {' '.join(COMMANDS[name])}",
        "machine": machine,
        "minutes": f"{(time.monotonic() - begun) / 60:.1f}",
        "exit status": str(done.returncode),
    }
    text = "".join(f"{key}: {value}\n" for key, value in head.items()) + "\n" + done.stdout
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.txt").write_text(text)
    print(f"{name}: exit status {done.returncode}, benchmarks/results/{name}.txt", flush=True)
    return done.returncode


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or ("no commit is known" if words[0] == "rev-parse" else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)}; all by default")
    names = parser.parse_args().names
    if unknown := [n for n in names if n not in COMMANDS]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(COMMANDS)}")
    sys.exit(max(measure(name) for name in names or COMMANDS))


if __name__ == "__main__":
    main()
