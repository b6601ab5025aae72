"""Values of expressions that are known without running a script."""

from __future__ import annotations

import ast
from time import perf_counter

import pytest

from agentrl.migration.literals import Scope, UnknownValueError


def value(script: str) -> object:
    """The value of ``x`` at the end of a script."""
    tree = ast.parse(f"{script}\nx")
    last = tree.body[-1]
    assert isinstance(last, ast.Expr)
    return Scope(tree).evaluate(last.value)


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("x = 1e-6 * 2", 2e-6),
        ("x = -(3 + 4) // 2 % 5 - 2**3", -(3 + 4) // 2 % 5 - 2**3),
        ("x = [1, (2, 'a'), None, True, not True]", [1, [2, "a"], None, True, False]),
        ("a = 'tiny'\nx = f'runs/{a}-{3}'", "runs/tiny-3"),
        ("a = 1\na = 2\nx = a\na = 3", 2),
        ("base = {'lr': 1}\nx = {**base, 'steps': 2}", {"lr": 1, "steps": 2}),
        ("x = dict(lr=1)", {"lr": 1}),
        ("x = {'a': [5]}['a'][0]", 5),
        ("import os\nx = os.environ.get('NO_SUCH', 'there')", "there"),
        ("import os\nx = os.path.join('a', 'b')", "a/b"),
        ("x = Path('a') / 'b'", "a/b"),
        ("x = str(4)", 4),
        ("import torch\nx = torch.bfloat16", "bfloat16"),
        ("x = SchedulerType.COSINE", "cosine"),
        ("p.add_argument('--learning-rate', '-l', default=3e-6)\nargs = p.parse_args()\nx = args.learning_rate", 3e-6),
        ("p.add_argument('--fast', action='store_true')\nx = args.fast", False),
        ("@dataclass\nclass A:\n    n: int = field(default=4)\na = A()\nx = a.n", 4),
        ("x = LoraConfig(r=8, target_modules='all-linear')", {"r": 8, "target_modules": "all-linear"}),
        ("if __name__ == '__main__':\n    a = 3\nx = a", 3),
        ("with open('f') as f:\n    a = 3\nx = a", 3),
    ],
)
def test_what_a_script_says_is_known(script: str, wanted: object) -> None:
    assert value(script) == wanted


@pytest.mark.parametrize(
    "script",
    [
        "x = read()",
        "x = gone",
        "x = 1 if fast else 2",
        "if fast:\n    x = 1",
        "for x in range(3):\n    pass\nx = x",
        "a = 1\na += 1\nx = a",
        "a, b = f()\nx = a",
        "x = [f() for f in fs]",
        "x = 1 / 0",
        "x = 'a' + 1",
        "x = 10**100",
        "x = {1: 2}[3]",
        "x = model.name",
        "x = x",
    ],
)
def test_what_only_a_run_knows_is_left_unknown(script: str) -> None:
    with pytest.raises(UnknownValueError):
        value(script)


@pytest.mark.parametrize("script", ["x = 9**9**9**9", "x = 'a' * 10**10", "x = [0] * 10**10", "x = 999999**64**64"])
def test_an_expression_that_would_take_forever_is_not_computed(script: str) -> None:
    began = perf_counter()
    with pytest.raises(UnknownValueError):
        value(script)
    assert perf_counter() - began < 20
