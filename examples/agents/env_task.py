"""The task of an episode, as a program of any kind finds it: in its environment. Python's own library is enough."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

TASK = json.loads(Path(os.environ["AGENTRL_TASK"]).read_text())
SYSTEM = "\n".join(m["content"] for m in TASK["messages"] if m["role"] == "system")
QUESTION = "\n".join(m["content"] for m in TASK["messages"] if m["role"] == "user")


def call(name: str, arguments: dict[str, Any] | str) -> str:
    """Run a tool of the environment; return its answer."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/agentrl/call",
        json.dumps({"name": name, "arguments": arguments}).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        content: str = json.load(response)["content"]
        return content
