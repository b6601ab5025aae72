import re
from collections import Counter
from fractions import Fraction

import pytest
from agentrl_envs.math_tasks import FAMILIES, LEVELS, draw
from agentrl_envs.splits import Split
from agentrl_tools.calculator import evaluate_expression


def independent_value(expression: str) -> Fraction:
    """Python's own arithmetic, on Fractions."""
    number = ""
    text = ""
    for character in expression + " ":
        if character.isdigit():
            number += character
            continue
        text += f"Fraction({number})" if number else ""
        number, text = "", text + character
    value = eval(text, {"Fraction": Fraction})
    assert isinstance(value, Fraction)
    return value


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_seed_is_a_task(split: Split) -> None:
    assert [draw(seed, split=split) for seed in range(50)] == [draw(seed, split=split) for seed in range(50)]
    assert len({draw(seed, split=split).question for seed in range(200)}) > 190


def test_the_task_of_a_seed_stays_the_same_between_versions() -> None:
    task = draw(7, split="train")
    assert (task.question, task.answer, task.family) == ("Work out 8*(9445-(6+5))-982.", 74490, "nested")


def test_the_splits_share_no_question_and_no_expression() -> None:
    train = [draw(seed, split="train", level=1) for seed in range(4000)]
    test = [draw(seed, split="test", level=1) for seed in range(2000)]
    assert not {task.question for task in train} & {task.question for task in test}
    assert not {task.expression for task in train} & {task.expression for task in test}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right(family: str, level: int) -> None:
    for seed in range(150):
        task = draw(seed, split="test", level=level, families=[family])
        assert task.family == family
        assert independent_value(task.expression) == task.answer == evaluate_expression(task.expression)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_bound_the_operands_and_the_operations(level: int) -> None:
    operations, digits = LEVELS[level]
    for seed in range(300):
        expression = draw(seed, split="train", level=level, families=["expression", "nested"]).expression
        operands = "".join(c if c.isdigit() else " " for c in expression).split()
        assert max(map(len, operands)) <= max(digits, 2)
        assert 1 <= len(operands) - 1 <= operations


@pytest.mark.parametrize("level", LEVELS)
def test_a_constant_answer_is_worth_nothing(level: int) -> None:
    answers = Counter(draw(seed, split="test", level=level).answer for seed in range(1000))
    assert answers.most_common(1)[0][1] < 50


def test_every_number_of_the_expression_stands_in_a_word_problem() -> None:
    for seed in range(300):
        task = draw(seed, split="train", families=["word"])
        operands = "".join(c if c.isdigit() else " " for c in task.expression).split()
        missing = [n for n in operands if n not in task.question]
        assert missing in ([], ["2"]), task  # "doubled"


def by_hand(question: str) -> Fraction:
    """What a chain of operations says, done one after the other and not through an expression."""
    start = re.search(r"^(?:Take|Start with) (\d+)", question)
    value = Fraction(start[1]) if start else None
    operation = r"(add|subtract|multiply|divide)(?: by)? (\d+)(?: (?:to|from|by) (\d+))?"
    for verb, one, two in re.findall(operation, question.lower()):
        n = Fraction(one)
        if two:  # the first operation, with the number it begins from
            value, n = (Fraction(two), n) if verb in ("add", "subtract") else (n, Fraction(two))
        assert value is not None
        value = {"add": value + n, "subtract": value - n, "multiply": value * n, "divide": value / n}[verb]
    assert value is not None
    return value


@pytest.mark.parametrize("family", ["steps", "word"])
def test_a_chain_of_operations_means_its_expression(family: str) -> None:
    counts: Counter[int] = Counter()
    for seed in range(600):
        task = draw(seed, split="train", families=[family])
        verbs = re.findall("add|subtract|multiply|divide", task.question.lower())
        if verbs:
            counts[len(verbs)] += 1
            assert by_hand(task.question) == task.answer, task
    assert set(counts) == {1, 2, 3}


def test_a_chain_in_one_sentence() -> None:
    questions = [draw(seed, split="train", families=["word"]).question for seed in range(2000)]
    taken = [question for question in questions if question.startswith("Take ")]
    opened = [question for question in questions if re.match("(Add|Subtract|Multiply|Divide) ", question)]
    assert 0.14 < len(taken) / 2000 < 0.21
    assert 0.14 < len(opened) / 2000 < 0.21
    shape = r"((add|subtract|multiply by|divide by) \d+(, | and |\.$)){1,3}$"
    assert all(re.fullmatch(r"Take \d+(, | and )" + shape, question) for question in taken)


def test_the_default_mixture() -> None:
    families = Counter(draw(seed, split="train").family for seed in range(2000))
    assert set(families) == set(FAMILIES)
    assert 0.09 < families["steps"] / 2000 < 0.16


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="level is 1 to 4, not 9"):
        draw(0, split="train", level=9)
    with pytest.raises(ValueError, match="families are some of"):
        draw(0, split="train", families=["algebra"])
