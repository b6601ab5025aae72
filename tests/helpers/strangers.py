"""What a stranger may hand over: run folders, models and datasets that would run something, or fill the memory.

Whatever would run leaves a file ``ran`` in the folder that it is given.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tomllib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import agentrl
from agentrl.models.source import locate_model
from agentrl.runs.writer import SCHEMA
from agentrl.settings.loader import build_config, dump_toml
from agentrl.training.checkpoint import VERSION
from tests.helpers import runs

CONFIG = 'env.name = "math-tools"\nsteps = 3\nmodel = "nano"\n'
DEEP = "[" * 100_000


class Touch:
    """Touches a file as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def make_run(folder: Path, config: str = CONFIG) -> Path:
    """Make a run folder that is as it should be."""
    runs.of(folder, [runs.solved(7), runs.wrong(7)])
    (folder / "config.toml").write_text(config)
    return folder


def _code(line: str) -> Callable[[Path, Path], object]:
    def spoil(run: Path, mark: Path) -> None:
        source = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        source += "from agentrl_envs.math_tools import MathTools as E\n"
        (run / "strange.py").write_text(source)
        text = line.format(file=run / "strange.py", mark=mark)
        (run / "config.toml").write_text(f"{text}\n" if "env.name" in text else f"{CONFIG}{text}\n")

    return spoil


def _text(name: str, text: str) -> Callable[[Path, Path], object]:
    return lambda run, mark: (run / name).write_text(text)


def _episodes(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path, Path], object]:
    def spoil(run: Path, mark: Path) -> None:
        (path,) = (run / "trajectories").glob("*.parquet")
        pq.write_table(change(pq.read_table(path)), path)

    return spoil


def _with(table: pa.Table, name: str, values: Any) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))


def _many_nulls(table: pa.Table) -> pa.Table:
    return pa.table({f.name: pa.nulls(20_000_000, f.type) for f in SCHEMA if not pa.types.is_nested(f.type)})


def _one_text_a_million_times(table: pa.Table) -> pa.Table:
    text = pa.DictionaryArray.from_arrays([0] * 50_000, ["y" * 1_000_000])
    columns = {f.name: pa.concat_arrays([table[f.name].combine_chunks()] * 25_000) for f in SCHEMA}
    return pa.table({**columns, "messages": text, "question": text})


def _checkpoint(run: Path, mark: Path) -> None:
    whole = {**tomllib.loads(CONFIG), "engine": "transformers", "learner": {"threads": 1}}  # else --resume stops at it
    (run / "config.toml").write_text(dump_toml(build_config(("run", whole))))
    folder = run / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    content = pickle.dumps(Touch(mark))
    for name in ("state.pt", "state.json", "tensors.safetensors"):
        (folder / name).write_bytes(content)
    digest = sha256(content).hexdigest()
    (folder / "digest").write_text(f"{digest} {digest}")
    (folder / "version").write_text(f"{VERSION} agentrl {agentrl.__version__}")


def _pipe(run: Path, mark: Path) -> None:
    for name in ("summary.json", "algorithm.json", "tools.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)


RUNS: dict[str, Callable[[Path, Path], object]] = {
    "env by path": _code('env.name = "{file}:E"'),
    "tools that are commands": _code('tools = ["mcp:touch {mark}"]'),
    "callbacks": _code('run.callbacks = ["{file}:E"]\nlearner.loss = "{file}:E"'),
    "stages": _code('[[stages]]\nsteps = 3\nenv.name = "{file}:E"'),
    "evaluation sets": _code('[eval.sets.a.env]\nname = "{file}:E"'),
    "deep settings": _text("config.toml", f"a = {DEEP}"),
    "settings with long keys": _text("config.toml", "a." * 200_000 + "a = 1"),
    "nulls without end": _episodes(_many_nulls),
    "one text a million times": _episodes(_one_text_a_million_times),
    "no Parquet": lambda run, mark: [p.write_bytes(b"PAR1" * 9) for p in (run / "trajectories").iterdir()],
    "a row without a task": _episodes(lambda t: _with(t, "task", [7, None])),
    "a row that stopped by magic": _episodes(lambda t: _with(t, "stop", ["magic", "terminated"])),
    "deep messages": _episodes(lambda t: _with(t, "messages", [DEEP, t["messages"][1].as_py()])),
    "columns of other types": _episodes(lambda t: t.set_column(2, "task", pa.array(["a", "b"]))),
    "odd metrics": _text(
        "metrics.jsonl", f'{{"step": 1, "reward": 1{"0" * 400}}}\n{{"step": 1, "a": {DEEP}\n{{"step": 1e99}}\nnull\n'
    ),
    "a line without end": _text("metrics.jsonl", "7" * 40_000_000),
    "deep tools": _text("tools.json", DEEP),
    "deep algorithm": _text("algorithm.json", DEEP),
    "odd summary": _text("summary.json", '{"reward_before": 1' + "0" * 400 + ', "reward_after": []}'),
    "a pickled checkpoint": _checkpoint,
    "pipes": _pipe,
    "odd scope": _text("evaluation.toml", "tasks = [[[[1]]]]"),
}


def make_strange_run(name: str, folder: Path, mark: Path) -> Path:
    """Make a run folder with one thing in it that a stranger put there."""
    run = make_run(folder)
    RUNS[name](run, mark)
    return run


def _config(**changes: Any) -> Callable[[Path, Path], object]:
    def spoil(model: Path, mark: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def _remote_code(model: Path, mark: Path) -> None:
    (model / "own.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    names = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
    _config(auto_map=names, model_type="strange")(model, mark)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": names, "tokenizer_class": "T"}))


def _pickled(model: Path, mark: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))


def _template(text: str) -> Callable[[Path, Path], object]:
    def spoil(model: Path, mark: Path) -> None:
        (model / "chat_template.jinja").write_text(text.format(mark=mark))
        path = model / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": text.format(mark=mark)}))

    return spoil


def _tokenizer(**changes: Any) -> Callable[[Path, Path], object]:
    def spoil(model: Path, mark: Path) -> None:
        path = model / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


_TENFOLD = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaa"}
MODELS: dict[str, Callable[[Path, Path], object]] = {
    "tools that are commands": lambda m, mark: (m / "agentrl.toml").write_text(f'tools = ["mcp:touch {mark}"]'),
    "deep recommendation": _text("agentrl.toml", f"a = {DEEP}"),
    "code of its own": _remote_code,
    "pickled weights": _pickled,
    "a wide config": _config(vocab_size=10**12),
    "a tokenizer that makes texts longer": _tokenizer(normalizer={"type": "Sequence", "normalizers": [_TENFOLD] * 9}),
    "a tall config": _config(num_hidden_layers=10**9),
    "deep config": _text("config.json", DEEP),
    "deep index": _text("model.safetensors.index.json", DEEP),
    "weights that are none": lambda m, mark: (m / "model.safetensors").write_bytes(b"\xff" * 64),
    "a template of memory": _template("{{{{ 'x' * 10**10 }}}}"),
    "a template without end": _template(
        "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{% endfor %}}{{% endfor %}}"
    ),
    "a template that gets out": _template("{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"),
}


def make_strange_model(name: str, folder: Path, mark: Path) -> Path:
    """Make a copy of nano with one thing in it that a stranger put there."""
    shutil.copytree(locate_model("nano"), folder)
    MODELS[name](folder, mark)
    return folder


def _table(table: Callable[[], pa.Table]) -> Callable[[Path], object]:
    return lambda path: pq.write_table(table(), path)


DATASETS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "nulls": (".parquet", _table(lambda: pa.table({"prompt": pa.nulls(100_000_000, pa.string())}))),
    "texts": (
        ".parquet",
        _table(lambda: pa.table({"prompt": pa.DictionaryArray.from_arrays([0] * 50_000, ["y" * 1_000_000])})),
    ),
    "no Parquet": (".parquet", lambda path: path.write_bytes(b"PAR1" * 9)),
    "deep rows": (".jsonl", lambda path: path.write_text(f'{{"prompt": {DEEP}')),
    "a long line": (".jsonl", lambda path: path.write_text('{"prompt": "' + "x" * 60_000_000)),
    "a deep list": (".json", lambda path: path.write_text(DEEP)),
    "odd rows": (".jsonl", lambda path: path.write_text('{"prompt": 1}\n[1]\n')),
}


def make_strange_dataset(name: str, folder: Path) -> Path:
    """Write a dataset."""
    suffix, write = DATASETS[name]
    path = folder / f"rows{suffix}"
    write(path)
    return path
