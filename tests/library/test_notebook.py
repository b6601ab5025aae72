"""A notebook, with a real kernel: live output, an interrupt that saves, and a mistake as a sentence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl import Run
from tests.helpers.pages import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SMALL = 'rollout={"tasks_per_step": 2, "group_size": 2, "max_tokens": 32}, eval={"every": 0, "final_tasks": 1}'
PATIENCE_S = 300


class Kernel:
    """A kernel that runs cells, in a folder of its own."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def run(self, source: str) -> list[Any]:
        """Run a cell; return its outputs."""
        cell = nbformat.v4.new_code_cell(source)
        self.client.nb.cells.append(cell)
        await self.client.async_execute_cell(cell, len(self.client.nb.cells) - 1)
        outputs: list[Any] = cell.outputs
        return outputs


@asynccontextmanager
async def kernel(folder: Path) -> AsyncIterator[Kernel]:
    notebook = nbformat.v4.new_notebook()
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=PATIENCE_S, allow_errors=True, resources=resources)
    async with client.async_setup_kernel():
        yield Kernel(client)


def of_type(outputs: list[Any], kind: str) -> list[Any]:
    return [output for output in outputs if output["output_type"] == kind]


def test_the_example_runs_and_its_table_is_one_output_that_was_updated(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE_S, resources=resources).execute()
    trained, history, episodes, model = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    [table] = of_type(trained, "display_data")
    assert "step 3/3 · ended" in table["data"]["text/html"]
    assert table["data"]["text/html"].count("<tr>") == 1 + 3
    assert "held-out reward after step 3: sampled" in table["data"]["text/plain"]
    [run] = of_type(trained, "execute_result")
    assert "<svg" in run["data"]["text/html"]
    assert run["data"]["text/plain"].startswith("<Run ")
    printed = [output["text"] for output in of_type(trained, "stream") if output["name"] == "stdout"]
    assert not printed, "no line a step beside the table"
    assert "eval/reward" in history[0]["data"]["text/html"]
    assert "were not solved" in episodes[0]["text"]
    assert "report.html" in model[0]["data"]["text/plain"]


@pytest.mark.anyio
@pytest.mark.long
async def test_an_interrupt_saves_and_returns_the_run(tmp_path: Path) -> None:
    async with kernel(tmp_path) as own:
        call = f'run = agentrl.train("math-tools", steps=100000, run={{"dir": "run"}}, {SMALL})'
        training = asyncio.create_task(own.run(f"import agentrl\n{call}\nprint(run.summary['interrupted'])"))
        metrics, begun = tmp_path / "run" / "metrics.jsonl", time.monotonic()
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
            assert time.monotonic() - begun < PATIENCE_S
            assert not training.done(), training.result()
            await asyncio.sleep(0.1)
        await own.client.km.interrupt_kernel()
        outputs = await training
        assert of_type(outputs, "stream")[-1]["text"].endswith("True\n")
        assert "interrupted, and saved" in of_type(outputs, "display_data")[0]["data"]["text/html"]
        again = await own.run(f'agentrl.train("math-tools", steps=1, run={{"dir": "second"}}, verbose=False, {SMALL})')
        assert "1 of 1 steps" in of_type(again, "execute_result")[0]["data"]["text/plain"]
    run = Run(tmp_path / "run")
    assert run.summary["checkpoint"] == run.summary["steps"] >= 3
    assert run.model.config.vocab_size


@pytest.mark.anyio
async def test_a_mistake_is_a_sentence_and_an_error_of_python_a_traceback(tmp_path: Path) -> None:
    async with kernel(tmp_path) as own:
        [wrong] = of_type(await own.run('import agentrl\nagentrl.train("math-tool")'), "error")
        assert wrong["traceback"] == ["agentrl: " + wrong["evalue"]]
        assert "did you mean 'math-tools'?" in wrong["evalue"]
        [other] = of_type(await own.run("1 / 0"), "error")
        assert len(other["traceback"]) > 1


@pytest.mark.anyio
async def test_an_environment_s_mistake_is_one_error_of_its_cell(tmp_path: Path) -> None:
    """A task of the event loop raises it: no traceback on stderr, after which the next cell would run."""
    source = f"""import agentrl
class Quiz(agentrl.ToolEnv):
    async def reset(self, *, seed, options=None):
        return self.ask("2 + 2?"), {{}}
    async def score(self, trajectory):
        return 1.0
agentrl.train(Quiz, steps=1, {SMALL})"""
    async with kernel(tmp_path) as own:
        outputs = await own.run(source)
    [wrong] = of_type(outputs, "error")
    assert wrong["traceback"] == ["agentrl: Quiz.score must return a dict of named rewards; got 1.0"]
    assert "Traceback" not in str(of_type(outputs, "stream"))


@pytest.mark.anyio
@pytest.mark.long
async def test_a_loss_of_a_cell_is_given_as_it_is(tmp_path: Path) -> None:
    source = f"""import agentrl
def plain(t, log_ratio):
    return -t.advantages * log_ratio.exp()
run = agentrl.train("math-tools", steps=1, learner={{"loss": plain}}, verbose=False, {SMALL})
print(run.config['learner']['loss'])"""
    async with kernel(tmp_path) as own:
        outputs = await own.run(source)
    assert not of_type(outputs, "error")
    assert of_type(outputs, "stream")[-1]["text"] == "__main__:plain\n"
