"""The plans on docs/scaling.md are those that the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agentrl.cli.dispatch import main

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```bash\n(agentrl plan [^`]*?)\n```\n\n```\n([^`]*?)\n```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("command", "output"),
    [
        pytest.param(c, o, marks=pytest.mark.long if n % 2 else pytest.mark.slow, id=re.sub(r"\s.*|.*gpus ", "", c))
        for n, (c, o) in enumerate(SHOWN)
    ],
)
def test_a_plan_of_the_page_is_the_command_s(command: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert capsys.readouterr().out.rstrip() == output


def test_the_page_shows_the_three_sizes_and_one_gpu() -> None:
    sizes = [re.search(r"--gpus (\S+)", command) for command, _ in SHOWN]
    assert [size and size[1] for size in sizes] == ["8xh100", "64xh100", "512xh100", "1xh100"]
    assert all("\nit fits; " in output or "\nit does not fit: " in output for _, output in SHOWN)
