"""A bridge as `agentrl_envs.inside_verifiers.bridge` is one, without verifiers: its tasks say what it does.

Its first argument is JSON; ``config`` may have ``tasks`` (texts), ``eval_tasks`` and ``refused``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

SETTINGS = json.loads(sys.argv[1])["config"]
TASKS = SETTINGS.get("tasks") or [f"say {n}" for n in range(20)]
ROWS = {"train": TASKS, **({"eval": SETTINGS["eval_tasks"]} if "eval_tasks" in SETTINGS else {})}


def answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def ask(base_url: str, api_key: str, *texts: str) -> tuple[str, str]:
    """Ask for a turn behind texts of the user and the model in turn; return it, and the error if there is none."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
            return json.load(reply)["choices"][0]["message"]["content"], ""
    except urllib.error.HTTPError as error:
        return "", f"upstream {error.code}"


def describe_trace(rewards: dict[str, Any], *errors: dict[str, str], seat: str = "agent") -> dict[str, Any]:
    metrics = {"length": 1.0}
    return {
        "seat": seat,
        "trained": seat != "judge",
        "rewards": rewards,
        "metrics": metrics,
        "stop": "done",
        "errors": errors,
    }


def play(text: str, base_url: str, api_key: str) -> dict[str, Any]:
    said, refused = ask(base_url, api_key, text)
    if text.startswith("die"):
        os._exit(3)
    if text.startswith("hang"):
        time.sleep(600)
    if text.startswith("raise"):
        error = {"type": "TaskError", "message": "scoring: ValueError: my reward broke", "trace": "in my_reward"}
        return {"errors": [], "traces": [describe_trace({"right": None}, error)]}
    if text.startswith("both"):
        errors = [{"type": f"{kind}Error", "message": "", "trace": ""} for kind in ("Provider", "Task")]
        return {"errors": [], "traces": [describe_trace({}, error) for error in errors]}
    if text.startswith("provider"):
        _, refused = ask(base_url, api_key, text, said, "once more")
        error = {"type": "ProviderError", "message": refused, "trace": ""}
        return {"errors": [], "traces": [describe_trace({"right": None}, error)]}
    if text.startswith("seats"):
        traces = [describe_trace({"won": [score, 1.0]}, seat=seat) for seat, score in (("first", 1.0), ("second", 0.0))]
        return {"errors": [], "traces": traces}
    if text.startswith("judge"):
        return {"errors": [], "traces": [describe_trace({"right": [1.0, 1.0]}, seat="judge")]}
    rewards = {"right": [float(said == text.removeprefix("say ")), 1.0], "brief": [0.5, 0.5]}
    return {"errors": [], "traces": [describe_trace(rewards)]}


def serve(number: int, task: tuple[str, int], base_url: str, api_key: str) -> None:
    answer({"id": number, "answer": play(ROWS[task[0]][task[1]], base_url, api_key)})


if "refused" in SETTINGS:
    answer({"refused": SETTINGS["refused"]})
    sys.exit()
if SETTINGS.get("ends"):
    sys.exit(1)
answer({"ready": True, "rows": ROWS})
for line in sys.stdin:
    asked = json.loads(line)
    if "show" in asked:
        rows, row = asked["show"]
        answer({"id": asked["id"], "answer": [{"role": "user", "content": ROWS[rows][row]}]})
    elif "play" in asked:
        threading.Thread(target=serve, args=(asked["id"],), kwargs=asked["play"], daemon=True).start()
    else:
        answer({"id": asked["id"], "heard": True})
os._exit(0)
