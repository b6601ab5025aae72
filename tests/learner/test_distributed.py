"""The learner in two processes: the numbers of one."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from agentrl import UserError, resources
from agentrl.engines.vllm import launch
from agentrl.errors import ProcessLostError
from agentrl.learner import packing_choice
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.models.lm_head import NotProven
from agentrl.settings.schema import EngineConfig
from agentrl.types import Sample
from tests.helpers.tiny import qwen3
from tests.learner.test_hidden_states import alike

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

UPDATES = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from tests.learner.test_hidden_states import alike
from tests.helpers.tiny import qwen3
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.distributed import init_process_group

process_group = init_process_group()
torch.manual_seed(process_group.rank)  # they begin apart
policy = qwen3().eval()
with torch.no_grad():
    policy.model.norm.weight.add_(float(process_group.rank))
own = dict(threads=1, max_tokens_per_microbatch=300, num_iterations=2, beta=0.1, entropy_coef=0.01)
settings = LossSettings(**own, loss=sys.argv[3])
learner = Learner(policy, make_optimizers(policy, "adamw", 1e-3), settings, process_group)
if process_group.is_worker:
    learner.run_worker()
else:
    metrics, old = [], []
    for rows in (alike(0), alike(1), alike(2)[:1]):  # at last fewer micro-batches than processes
        cut = [i % int(sys.argv[4]) for i in range(len(rows))]
        metrics.append(learner.update(rows, updates=cut))
        old += learner.old_logprobs
        learner.set_lr(1.0 if len(metrics) < 2 else 0.5)
    process_group.broadcast(None)
saved = {} if process_group.is_worker else {"metrics": metrics, "old": old}
torch.save({"policy": policy.state_dict(), **saved}, f"{sys.argv[1]}/{process_group.rank}.pt")
process_group.destroy()
"""


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "cut"), [*(pytest.param(n, "1", marks=pytest.mark.long) for n in ("dapo", "grpo")), ("dapo", "3")]
)
def test_two_processes_learn_what_one_learns(loss: str, cut: str, tmp_path: Path) -> None:
    script, here = tmp_path / "updates.py", str(Path(__file__).parents[2])
    script.write_text(UPDATES)
    for folder in ("two", "one"):
        (tmp_path / folder).mkdir()
    run(*TORCHRUN, str(script), str(tmp_path / "two"), here, loss, cut)
    run(sys.executable, str(script), str(tmp_path / "one"), here, loss, cut)
    first, second = (torch.load(tmp_path / "two" / f"{rank}.pt") for rank in (0, 1))
    alone = torch.load(tmp_path / "one" / "0.pt")
    for name, weight in alone["policy"].items():
        assert torch.equal(first["policy"][name], second["policy"][name])
        torch.testing.assert_close(first["policy"][name], weight, atol=1e-5, rtol=1e-4)
    for one, other in zip(first["metrics"], alone["metrics"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert len(first["old"]) == len(alone["old"]) > 10  # of all rows, whoever learned from them
    for mine, whole in zip(first["old"], alone["old"], strict=True):
        torch.testing.assert_close(mine, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_by_the_command_line(tmp_path: Path) -> None:
    words = ["-m", "agentrl", "train", "--env", "math-tools", "--steps", "2", "--eval.final_tasks", "8"]
    words += [
        "--rollout.tasks_per_step",
        "4",
        "--rollout.group_size",
        "4",
        "--eval.every",
        "0",
        "--learner.max_tokens_per_microbatch",
        "512",
    ]
    run(*TORCHRUN, *words, "--run.dir", str(tmp_path / "two"))
    run(sys.executable, *words, "--run.dir", str(tmp_path / "one"))
    two, one = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=2e-3, rtol=1e-2)
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2]


@pytest.mark.long
def test_several_processes_resume_together(tmp_path: Path) -> None:
    """The optimizer's memory is everybody's: copies that step apart would not stay the same."""
    words = ["-m", "agentrl", "train", "--env", "math-tools", "--steps", "3", "--eval.final_tasks", "2"]
    words += ["--rollout.tasks_per_step", "4", "--rollout.group_size", "4", "--eval.every", "0"]
    words += ["--deterministic", "true", "--run.save_every", "1"]
    run(*TORCHRUN, *words, "--run.dir", str(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000003")
    run(*TORCHRUN, "-m", "agentrl", "train", "--resume", str(tmp_path / "parts"))
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_single_process_keeps_its_whole_shard() -> None:
    process_group = ProcessGroup()
    assert not process_group.is_worker
    assert process_group.shard([1, 2, 3]) == [1, 2, 3]
    assert process_group.all_gather("mine") == ["mine"]


def test_a_single_process_broadcasts_to_nobody() -> None:
    process_group = ProcessGroup()
    process_group.broadcast(None)
    process_group.destroy()


def test_an_error_in_the_middle_of_something_leaves_the_connections_to_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[str] = []
    monkeypatch.setattr(ProcessGroup, "destroy", lambda group: left.append("destroyed"))
    group = ProcessGroup(0, 2)
    with group.taking_part():
        pass
    with pytest.raises(ValueError, match="between"), group.joined():  # the others are told
        raise ValueError("between two steps")
    assert group.is_in_step
    assert left == ["destroyed"]
    with pytest.raises(MemoryError, match="no room"), group.joined(), group.taking_part():
        raise MemoryError("no room")
    assert not group.is_in_step
    with pytest.raises(MemoryError, match="no room"), group.taking_part():
        raise AssertionError("the others would take it for something else")
    assert left == ["destroyed"]


class LastWords:
    """A roll call that keeps the last word."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def close(self, last_word: str = "done") -> None:
        self.words.append(last_word)


@pytest.mark.parametrize(
    ("rank", "error", "word"),
    [
        (0, None, "done"),
        (0, ValueError("of which the others are told"), "done"),
        (1, None, "done"),
        (1, SystemExit(1), "done"),  # the first one has told its error
        (1, ValueError("its own"), "failed"),
        (1, ProcessLostError("another one is gone"), ""),
    ],
)
def test_the_others_hear_how_a_process_has_ended(rank: int, error: BaseException | None, word: str) -> None:
    roll_call: Any = LastWords()
    with suppress(BaseException), ProcessGroup(rank, 2, roll_call).joined():
        if error is not None:
            raise error
    assert roll_call.words == [word]


FAILING = """
import sys
import threading
from torch import distributed
from agentrl.cli.dispatch import main
from agentrl.learner.learner import Learner

run_steps = Learner._run_steps

def fail(self, *arguments):
    if not self.process_group.is_worker:
        raise MemoryError("no room on rank 0")
    return run_steps(self, *arguments)

Learner._run_steps = fail
distributed.destroy_process_group = lambda: threading.Event().wait()  # as NCCL's may
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_error_of_the_first_process_in_a_step_ends_all_of_them_and_is_what_is_seen(tmp_path: Path) -> None:
    """Without a launcher that ends the others."""
    (script := tmp_path / "failing.py").write_text(FAILING)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["train", "--env", "math-tools", "--steps", "1", "--eval.every", "0", "--rollout.tasks_per_step", "2"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *words, "--run.dir", str(tmp_path / "run")],
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        said = [process.communicate(timeout=180)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert "MemoryError: no room on rank 0" in said[0]
    assert "agentrl: another one of the learner's processes is gone" in said[1]
    assert "Traceback" not in said[1]
    assert [process.returncode for process in ranks] == [1, ProcessLostError.exit_status], said


class Wire:
    """The connection of two processes, here two threads."""

    def __init__(self) -> None:
        self.messages: Queue[bytes] = Queue()
        self.tensors: list[Queue[torch.Tensor]] = [Queue(), Queue()]  # to each
        self.barrier = threading.Barrier(2, timeout=60)
        self.gathered: list[Any] = [None, None]


class Threads(ProcessGroup):
    """Processes that are threads: messages are pickled, as torch does, and refused if they are on a device."""

    def __init__(self, rank: int, wire: Wire) -> None:
        super().__init__(rank, 2)
        self.wire = wire

    def _exchange(self, mine: Any) -> list[Any]:
        self.wire.gathered[self.rank] = mine
        self.wire.barrier.wait()
        everyone = list(self.wire.gathered)
        self.wire.barrier.wait()
        return everyone

    def broadcast_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        own = list(parameters)
        first, _ = self._exchange([p.detach().clone() for p in own])
        for p, value in zip(own, first, strict=True):
            p.data.copy_(value)

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        own = [p for p in parameters if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        for p, one, other in zip(own, *self._exchange(grads), strict=True):
            p.grad = one + other

    def all_gather(self, mine: Any) -> list[Any]:
        return [pickle.loads(whole) for whole in self._exchange(pickle_message(mine))]

    def send(self, tensors: Sequence[torch.Tensor], rank: int) -> None:
        for tensor in tensors:
            assert tensor.device.type == "cpu"
            self.wire.tensors[rank].put(tensor.clone())

    def receive_from(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            sent = self.wire.tensors[self.rank].get(timeout=60)
            assert (tensor.shape, tensor.dtype) == (sent.shape, sent.dtype)  # as gloo would not see
            tensor.copy_(sent)

    def broadcast(self, message: Any) -> None:
        self.wire.messages.put(pickle_message(message))

    def receive(self) -> Any:
        return pickle.loads(self.wire.messages.get(timeout=60))


def pickle_message(what: Any) -> bytes:
    """Pickle it. A tensor without dimensions is a number that was left on its device: others have no such device."""

    def check(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            assert value.ndim > 0, "a number travels as a tensor"
            assert value.device.type == "cpu"
        elif isinstance(value, dict):
            check(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for one in value:
                check(one)
        else:
            assert isinstance(value, (str, bool, int, float, type(None))), type(value)

    check(what)
    return pickle.dumps(what)


def run_in_two(first: Callable[[ProcessGroup], Any], second: Callable[[ProcessGroup], Any]) -> Any:
    """Return what the first of two processes returns; raise what goes wrong in either."""
    wire, wrong = Wire(), []

    def follow() -> None:
        try:
            second(Threads(1, wire))
        except BaseException as error:
            wrong.append(error)
            wire.barrier.abort()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        return first(Threads(0, wire))
    finally:
        wire.messages.put(pickle.dumps(None))
        thread.join(60)
        if wrong and not isinstance(wrong[0], threading.BrokenBarrierError):
            raise wrong[0]


@cache
def tiny_policy() -> Any:
    """Made once: threads that seed torch side by side would make other weights."""
    return qwen3().eval()


def build_learner(process_group: ProcessGroup, passes: list[int], **settings: Any) -> Learner:
    policy = copy.deepcopy(tiny_policy())
    learner = Learner(
        policy, make_optimizers(policy, "adamw", 1e-3), LossSettings(threads=1, **settings), process_group
    )
    policy.base_model.register_forward_hook(lambda *call: passes.append(1))
    return learner


SETTINGS: list[dict[str, Any]] = [
    {},
    {"beta": 0.1},
    {"top_entropy_quantile": 0.4, "entropy_coef": 0.01},
    {"beta": 0.1, "top_entropy_quantile": 0.4, "loss": "grpo", "num_iterations": 2},
]


def dissimilar() -> list[Sample]:
    """Rows of a few groups, some of zero advantage."""
    rows = [row for group in range(3) for row in alike(group)]
    return [
        Sample(r.token_ids, r.loss_mask, r.logprobs, [a * (i % 3 > 0) for a in r.advantages])
        for i, r in enumerate(rows)
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_passes_are_divided_and_the_numbers_are_those_of_one_process(settings: dict[str, Any]) -> None:
    """Also those of the reference, and those that find the entropies."""
    counts: list[list[int]] = [[], [], []]
    more = {"packing": "padded", "max_tokens_per_microbatch": 200, **settings}
    alone = build_learner(ProcessGroup(), counts[2], **more)
    expected = alone.update(dissimilar())
    policies: list[Any] = [None, None]

    def first(process_group: ProcessGroup) -> tuple[dict[str, float], Any]:
        learner = build_learner(process_group, counts[0], **more)
        policies[0] = learner.policy
        return learner.update(dissimilar()), learner.learned

    def second(process_group: ProcessGroup) -> None:
        learner = build_learner(process_group, counts[1], **more)
        policies[1] = learner.policy
        learner.run_worker()

    metrics, old = run_in_two(first, second)
    assert metrics == pytest.approx(expected, abs=1e-5)
    assert [o is None for o in old] == [o is None for o in alone.learned]
    for own, one_process in zip(old, alone.learned, strict=True):  # logprobs, gradients, corrections
        if own is not None:
            torch.testing.assert_close(own, one_process, atol=1e-6, rtol=1e-4)
    per_batch = 1 * settings.get("num_iterations", 1) + ("beta" in settings) + ("top_entropy_quantile" in settings)
    mine, its, whole = map(len, counts)
    assert mine + its == whole
    assert 0 <= mine - its <= per_batch
    for one, other in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(policies[0].parameters(), alone.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shared", [True, False])
def test_the_first_process_decides_how_rows_are_packed(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether prefixes can be shared is found by comparing floats, which may come out otherwise beside it."""
    asked: list[int] = []

    def refuse_sharing(model: Any) -> None:
        asked.append(1)
        if not shared:
            raise NotProven("it differs, here")

    monkeypatch.setattr(packing_choice, "prove_prefix_sharing", refuse_sharing)
    monkeypatch.setattr("warnings.warn", lambda *said, **more: None)
    counts: list[list[int]] = [[], []]
    tiny_policy()
    metrics = run_in_two(
        lambda process_group: build_learner(process_group, counts[0], max_tokens_per_microbatch=200).update(alike(0)),
        lambda process_group: build_learner(process_group, counts[1], max_tokens_per_microbatch=200).run_worker(),
    )
    assert len(asked) == 1
    assert metrics == pytest.approx(
        build_learner(ProcessGroup(), [], max_tokens_per_microbatch=200, packing="padded").update(alike(0)), abs=1e-4
    )


@pytest.mark.parametrize(("name", "installed"), [("auto", True), ("vllm", True), ("vllm", False)])
def test_vllm_in_the_first_of_several_processes_is_refused_on_gpus(
    name: Any, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "is_installed", lambda: installed)
    resources.check_engine_processes(EngineConfig(name=name))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=rf"'{name}' is vLLM in the first process .* the 4 processes .*agentrl serve"):
        resources.check_engine_processes(EngineConfig(name=name))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        resources.check_engine_processes(EngineConfig(name=name))


def test_engines_that_go_with_several_processes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    resources.check_engine_processes(EngineConfig(name="vllm"))  # on the CPU weights go through memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "is_installed", lambda: True)
    resources.check_engine_processes(EngineConfig(name="transformers"))
    resources.check_engine_processes(EngineConfig(name="server", urls=("http://127.0.0.1:1",)))
    resources.check_engine_processes(EngineConfig(), deterministic=True)
    monkeypatch.setattr(launch, "is_installed", lambda: False)
    resources.check_engine_processes(EngineConfig())


@pytest.mark.slow
def test_a_mistake_before_the_first_step_ends_every_process(tmp_path: Path) -> None:
    """The others have not yet begun to learn, and would wait for the first one's weights for a day."""
    words = ["-m", "agentrl", "train", "--env", "math-tools", "--steps", "1", "--run.dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*TORCHRUN, *words, "--run.trackers", "nobody"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "nobody" in done.stderr
    assert "Timed" not in done.stderr
