"""The recipes for clusters: they parse, and each command and setting in them is there."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.cli import player, train
from agentrl.players.connection import KEY_ENV
from agentrl.settings.loader import build_config

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPTS = ("players.slurm", "ray_job.sh")
MANIFESTS = ("players.yaml", "players.sky.yaml")


def read_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of agentrl's in a script."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        if (found := re.search(r"(?:^|\s)(agentrl (?:train|player) .*?)( &)?$", line)) and not line.startswith("#"):
            yield shlex.split(found[1])[1:]


def read_manifest(name: str) -> tuple[list[Any], list[list[str]]]:
    documents = list(yaml.safe_load_all((FOLDER / name).read_text()))
    if name == "players.sky.yaml":
        return documents, list(read_commands(documents[0]["run"]))
    specs = [d["spec"]["template"]["spec"] for d in documents if d["kind"] in ("Job", "Deployment")]
    return documents, [c["command"][1:] for spec in specs for c in spec["containers"]]


def check_command(words: list[str]) -> None:
    verb, *rest = words
    if verb == "train":
        config = build_config(*train.COMMAND.parse(rest).layers)
        assert config.players.are_used
        assert config.run.resume is (config.run.dir is not None)  # a recipe is begun again where a node was lost
    else:
        assert player.COMMAND.parse(rest).names[0].startswith("http://")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_sound_and_its_commands_are_there(name: str) -> None:
    assert subprocess.run(["bash", "-n", FOLDER / name], check=False).returncode == 0
    text = (FOLDER / name).read_text()
    commands = list(read_commands(text))
    assert commands
    for words in commands:
        check_command(words)
    assert KEY_ENV in text


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_parses_and_its_commands_are_there(name: str) -> None:
    _, commands = read_manifest(name)
    assert [words[0] for words in commands] == ["train", "player"]
    for words in commands:
        check_command(words)


def test_the_kubernetes_manifest_fits_together() -> None:
    documents, commands = read_manifest("players.yaml")
    service, claim, job, deployment = documents
    (volume,) = job["spec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    assert commands[0][commands[0].index("--players.port") + 1] == str(port)
    assert commands[1][1] == f"http://{service['metadata']['name']}:{port}"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    for document in (job, deployment):
        (container,) = document["spec"]["template"]["spec"]["containers"]
        assert [variable["name"] for variable in container["env"]] == [KEY_ENV]


def test_every_recipe_is_named_on_the_page_and_checked_here() -> None:
    page = (FOLDER.parents[1] / "docs" / "scaling.md").read_text()
    files = sorted(path.name for path in FOLDER.iterdir())
    assert files == sorted((*SCRIPTS, *MANIFESTS))
    assert [name for name in files if f"examples/cluster/{name}" not in page] == []
