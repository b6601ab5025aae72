"""Losses, advantages and the like that agentrl did not write: their contracts, and what breaks them in a sentence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import UserError
from agentrl.cli import main
from agentrl.learner.advantages.rule import apply_advantage
from agentrl.learner.losses.losses import Tokens
from agentrl.learner.losses.objective import Objective, compute_token_losses
from agentrl.learner.optimizers import make_optimizers
from agentrl.runs.reader import parse_episode_id
from agentrl.settings.catalogue import bind_entry
from agentrl.settings.registry import list_registered, load_entry
from agentrl.types import Segment, Stop, Trajectory
from agentrl.view.explain import explain_token
from agentrl.view.store import Store
from agentrl.view.tokens import TokenTexts
from tests.settings.test_registry import write

LOSSES = '''
import torch
from agentrl import advantage, loss

@loss(metrics={"mine/share": "share of the tokens whose ratio is over tau"}, explain="a soft cap of {tau}")
def mine(t, log_ratio, *, tau: float = 0.5):
    """REINFORCE with a soft cap.

    Args:
        tau: the cap.
    """
    ratio = log_ratio.exp()
    return -(ratio / tau).tanh() * tau * t.advantages, {"mine/share": (ratio > tau).float()}

def plain(t, log_ratio): return -log_ratio.exp() * t.advantages
def short(t, log_ratio): return -log_ratio[:1]
def number(t, log_ratio): return 0.5
def scalar(t, log_ratio): return -log_ratio.sum()
def whole(t, log_ratio): return (log_ratio * 10).detach().long()
def still(t, log_ratio): return -log_ratio.detach()
def raising(t, log_ratio): return {}["gone"]
def untyped(t, log_ratio, *, tau=0.5): return -log_ratio
def anything(t, log_ratio, **more): return -log_ratio
async def later(t, log_ratio): return -log_ratio
def undeclared(t, log_ratio): return -log_ratio, {"mine/x": log_ratio}
@loss(metrics={"mine/x": "x"})
def odd(t, log_ratio): return -log_ratio, {"mine/x": 3.0}
@advantage()
def other(groups): return [[0.0 for _ in group] for group in groups]
def doubling(t, log_ratio): return -log_ratio * t.advantages.mul_(2)
def shifting(t, log_ratio): return -log_ratio.add_(1) * t.advantages
def leaving(t, log_ratio): raise SystemExit(3)
'''


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path / "my_losses.py", LOSSES)
    forget()  # another test's
    yield
    forget()


def forget() -> None:
    """Forget the modules of these tests; torch and transformers stay."""
    for name in [n for n in sys.modules if n.startswith(("my_", "mod_"))]:
        del sys.modules[name]


def tokens() -> Tokens:
    logp = torch.tensor([-1.0, -2.0, -0.5]).requires_grad_()
    old = logp.detach()
    return Tokens(logp, old, old, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]), 2, old)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "short",
            "returns one number a trained token, a floating-point tensor of shape (3,), not float32 of shape (1,)",
        ),
        ("number", "a floating-point tensor of shape (3,), not 0.5"),
        ("scalar", "a floating-point tensor of shape (3,), not float32 of shape ()"),
        ("whole", "a floating-point tensor of shape (3,), not int64 of shape (3,)"),
        ("still", "has no gradient: compute it from log_ratio or t.logprobs"),
        ("raising", "raised KeyError: 'gone' (my_losses.py, line 21)"),
        ("untyped", "argument 'tau' of loss 'untyped' has no type; write `tau: str`, say"),
        ("anything", "takes **more; name each argument, with its type"),
        ("later", "is an `async def`; it is called where nothing is awaited: write `def`"),
        ("undeclared", "returned a metric 'mine/x' that it does not declare: @loss(metrics={...})"),
        ("odd", "metric 'mine/x' is a tensor of values, (n,), not 3.0"),
        ("other", "it is declared as an advantage, not as a loss"),
        ("doubling", "changes t.advantages in place, which other terms and passes read; make a new tensor"),
        ("shifting", "changes log_ratio in place"),
        ("leaving", "raised SystemExit: 3"),
        ("gone", "'my_losses' has no 'gone'"),
    ],
)
def test_a_loss_that_breaks_its_contract_is_told_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as told:
        compute_token_losses(Objective(f"my_losses.py:{name}"), tokens())
    assert f"loss 'my_losses.py:{name}'" in str(told.value)


def test_a_loss_of_a_file_takes_its_parameters_and_gives_its_metrics() -> None:
    objective = Objective("my_losses.py:mine", loss_args={"tau": 2.0})
    losses, _, metrics = compute_token_losses(objective, tokens())
    torch.testing.assert_close(losses.detach(), -torch.tensor(0.5).tanh() * 2 * tokens().advantages)
    assert metrics.values()["mine/share"] == 0.0
    assert objective.loss_entry.explain == "a soft cap of 2"
    for args, sentence in (({"tua": 1}, "did you mean 'tau'?"), ({"tau": "x"}, "input should be a valid number")):
        with pytest.raises(UserError, match=re.escape(sentence)):
            bind_entry("loss", "my_losses.py:mine", args)


def episode(reward: float | None) -> Trajectory:
    segments = (Segment("model", (1,), (-1.0,), (0,)),)
    return Trajectory(0, segments, (), Stop.TERMINATED, rewards={"r": reward})


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return [[1.0] * len(g) for g in groups][:1]", "returns a list for each of the 2 groups, not [[1.0, 1.0]]"),
        ("return [[1.0] for g in groups]", "returns an advantage for each of the 2 episodes of a group, not [1.0]"),
        ("return [[float('nan')] * len(g) for g in groups]", "returned nan; an advantage is finite"),
        ("return [['x'] * len(g) for g in groups]", "returned 'x'; an advantage is a number, or one a turn"),
        ("return [[(1.0, 2.0)] * len(g) for g in groups]", "returned 2 advantages for an episode of 1 turns"),
        ("return None", "returns a list for each of the 2 groups, not None"),
        ("raise ValueError('no')", "raised ValueError: no"),
    ],
)
def test_an_advantage_that_breaks_its_contract_is_told(body: str, sentence: str, tmp_path: Path) -> None:
    write(tmp_path / "my_advantages.py", f"def mine(groups):\n    {body}\n")
    groups = [[episode(1.0), episode(0.0)]] * 2
    with pytest.raises(UserError, match=re.escape(sentence)):
        apply_advantage(bind_entry("advantage", "my_advantages.py:mine"), groups)


def test_an_optimizer_steps_what_is_trained_and_nothing_else(tmp_path: Path) -> None:
    text = """
import torch
def sgd(policy, lr, *, momentum: float = 0.0): return torch.optim.SGD(policy.parameters(), lr=lr, momentum=momentum)
def half(policy, lr): return torch.optim.SGD([policy.weight], lr=lr)
def foreign(policy, lr): return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=lr)
def none(policy, lr): return None
"""
    write(tmp_path / "my_optimizers.py", text)
    model = torch.nn.Linear(3, 3)
    (made,) = make_optimizers(model, "my_optimizers.py:sgd", 0.1, momentum=0.9)
    assert made.param_groups[0]["momentum"] == 0.9
    wrong = {"half": "leaves out 1 trained parameters, such as bias", "foreign": "not trained", "none": "not None"}
    for name, sentence in wrong.items():
        with pytest.raises(UserError, match=sentence):
            make_optimizers(model, f"my_optimizers.py:{name}", 0.1)


def test_names_that_clash_are_told_and_agentrls_own_are_nobody_elses(tmp_path: Path) -> None:
    for package, module in (("one", "mod_one"), ("two", "mod_two")):
        info = tmp_path / "site" / f"{package}-1.0.dist-info"
        write(tmp_path / "site" / f"{module}.py", "def mine(t, log_ratio): return -log_ratio\n")
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        write(info / "entry_points.txt", f"[agentrl.losses]\nmine = {module}:mine\ngrpo = {module}:mine\n")
    sys.path.append(str(tmp_path / "site"))
    assert "mine" in list_registered("loss")
    with pytest.raises(UserError, match=r"loss 'mine' is registered by one \(mod_one:mine\) and two \(mod_two:mine\)"):
        load_entry("loss", "mine")
    assert load_entry("loss", "mod_two:mine").reduction == "token_mean"
    assert load_entry("loss", "grpo").reduction == "seq_mean_token_mean"


SMALL = ["--rollout.tasks_per_step", "2", "--rollout.group_size", "4", "--rollout.max_tokens", "32", "--eval.every"]
SMALL += ["0", "--eval.final_tasks", "1", "--run.save_every", "1"]
MINE = """
import torch
from agentrl import Callback, advantage, engine, importance_sampling, optimizer, sampler
from agentrl.environments.task_sampler import TaskDraw, TaskSampler

@advantage(explain="{reward} - {mean:.3g}, times {scale}")
def centred(groups, *, scale: float = 1.0):
    def mean(group): return sum(t.reward or 0.0 for t in group) / max(len(group), 1)
    return [[scale * (i % 2 - 0.5 + (t.reward or 0.0) - mean(group)) for i, t in enumerate(group)] for group in groups]

@importance_sampling(explain="at most {cap}")
def capped(t, *, cap: float = 1.5):
    return (t.old_logprobs - t.sampling_logprobs).exp().clamp(max=cap)

@optimizer()
def sgd(policy, lr, *, momentum: float = 0.0):
    return torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=lr, momentum=momentum)

class Backwards(TaskSampler):
    def __init__(self, count, seed, *, first: int = 1000):
        super().__init__(count, seed, first)
    def draw(self):
        self.cursor -= 1
        return TaskDraw(self.cursor, {})

@engine()
def slow(policy, config, *, threads: int | None = None, label: str):
    from agentrl.engines.embedded.engine import TransformersEngine
    return TransformersEngine(policy, capacity=2, max_context=config.engine.max_model_len, threads=threads)

class Ear(Callback):
    def on_step_end(self, step, metrics):
        with open("heard.txt", "a") as file:
            file.write(f"{step}\\n")
"""


def train_words(mine: str) -> list[str]:
    names = {
        "learner.loss": "my_losses.py:mine",
        "learner.loss_args.tau": "0.7",
        "learner.advantage": f"{mine}centred",
        "learner.advantage_args.scale": "2.0",
        "learner.importance_sampling_mode": f"{mine}capped",
        "learner.importance_sampling_args.cap": "1.25",
        "learner.optimizer": f"{mine}sgd",
        "learner.optimizer_args.momentum": "0.5",
        "rollout.sampler": f"{mine}Backwards",
        "rollout.sampler_args.first": "500",
        "engine.name": f"{mine}slow",
        "engine.args.label": "x",
        "run.callbacks": f"{mine}Ear",
    }
    return [*(word for n, v in names.items() for word in (f"--{n}", v)), *SMALL]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["file", "entry point"])
def test_everything_of_the_algorithm_may_come_from_outside(by: str, tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "site" / "my_parts.py", MINE)
    mine = "site/my_parts.py:"
    if by == "entry point":
        groups = {
            "advantages": "centred",
            "importance_sampling": "capped",
            "optimizers": "sgd",
            "samplers": "Backwards",
        }
        groups |= {"engines": "slow", "callbacks": "Ear"}
        entries = "".join(f"[agentrl.{g}]\nown-{n} = my_parts:{n}\n" for g, n in groups.items())
        write(tmp_path / "site/parts-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
        write(tmp_path / "site/parts-1.0.dist-info/entry_points.txt", entries)
        sys.path.append(str(tmp_path / "site"))
        mine = "own-"
    words = ["train", "--env", "math-tools", *train_words(mine), "--run.dir", "run"]
    assert main([*words, "--steps", "1"]) == 0, capsys.readouterr().err
    run = tmp_path / "run"
    assert (tmp_path / "heard.txt").read_text() == "1\n"
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert row["mine/share"] == 1.0
    recorded = json.loads((run / "algorithm.json").read_text())
    assert recorded["loss"]["parameters"]["tau"]["value"] == 0.7
    assert recorded["engine"]["parameters"]["label"]["value"] == "x"
    # what looks at the run runs none of it
    for file in tmp_path.rglob("my_*.py"):
        file.write_text("raise SystemExit('somebody looked, and this ran')")
    forget()
    store = Store(run)
    store.refresh()
    assert parse_episode_id("1:0")
    said = "\n".join(explain_token(store, TokenTexts(store), "1:0", 70))
    assert "a soft cap of 0.7" in said or "not trained" in said
    for verb in (["report", "run"], ["explain", "run", "1:0"]):
        assert main(verb) == 0
    assert main(["eval", "--env", "math-tools", "--model", "run", "--tasks", "2", "--out", "e"]) == 0
    # a run whose loss has gone cannot resume, and says so; one that was changed goes on, and says so
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--steps", "2"]) == 2
    assert "my_losses" in capsys.readouterr().err
    (tmp_path / "my_losses.py").write_text(LOSSES + "\n# changed\n")
    (tmp_path / "site/my_parts.py").write_text(MINE)
    assert main(["train", "--resume", "run", "--steps", "2"]) == 0, capsys.readouterr().err
    assert "the loss is not as it was when the run began: its code was changed" in (run / "events.jsonl").read_text()
