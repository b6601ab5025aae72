"""An agent that is a command: it works in the folder of the task's files, with Python's own library alone.

agentrl train --env examples/file_env.py:Sums --agent "python examples/file_agent.py"
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path


def ask(messages: list[dict[str, str]]) -> str:
    """Ask the policy for a turn."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    return text


def main() -> None:
    """Show the policy the file, and write the last number of its answer."""
    messages = json.loads(Path(os.environ["AGENTRL_TASK"]).read_text())["messages"]
    messages.append({"role": "user", "content": Path("numbers.txt").read_text()})
    if numbers := re.findall(r"\d+", ask(messages)):
        Path("answer.txt").write_text(numbers[-1])


if __name__ == "__main__":
    main()
