"""Conversations that nano learns from: first right ones, then mostly wrong ones.

After pre-training the most likely behaviour must be a wrong one. If a right one were, greedy decoding would
be right before any reinforcement learning, and training would only sharpen what is there.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_tools.calculator import evaluate_expression, format_number

from agentrl_envs import math_tasks, shop_tasks, symbols

Message = dict[str, Any]
Conversation = tuple[list[Message], list[dict[str, Any]]]  # messages, tools

HELD_BACK = "steps"
DEMONSTRATED = tuple(family for family in math_tasks.FAMILIES if family != HELD_BACK)

WRONG = {
    "right": 0.25,
    "no_box": 0.33,
    "guess": 0.12,
    "wrong_expression": 0.06,
    "malformed_call": 0.13,
    "unknown_tool": 0.11,
}
SYMBOLS_WRONG = {"right": 0.3, "no_box": 0.48, "guess": 0.11, "other_question": 0.11}
BOXED = 0.3  # of the answers that are wrong in another way, or come after a failed call
MISNAMED = {"calculator": ("calc", "calculate", "math"), "price": ("cost", "get_price", "prices")}
KINDS = {"math": 11, "shop": 4, "symbols": 4, "copy": 1}


def generate_demonstrations(rng: random.Random, *, noise: bool) -> Iterator[Conversation]:
    while True:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        match kind:
            case "math":
                yield _demonstrate_math(rng, _pick(rng, WRONG) if noise else "right")
            case "shop":
                yield _demonstrate_shop(rng, _pick(rng, WRONG) if noise else "right")
            case "symbols":
                yield _demonstrate_symbol(rng, _pick(rng, SYMBOLS_WRONG) if noise else "right")
            case _:
                yield _demonstrate_copy(rng)


def _pick(rng: random.Random, odds: Mapping[str, float]) -> str:
    return rng.choices(list(odds), list(odds.values()))[0]


def _describe_function(name: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


CALCULATOR = _describe_function("calculator", "expression")
PRICE = _describe_function("price", "item")


# Messages


def _opening(rng: random.Random, system: str, question: str) -> list[Message]:
    user = {"role": "user", "content": question}
    return [user] if rng.random() < 0.05 else [{"role": "system", "content": system}, user]


def _calls(*calls: tuple[str, str, str]) -> Message:
    """Make an assistant message of calls, each (tool, argument's name, argument)."""
    functions = [{"name": tool, "arguments": {key: value}} for tool, key, value in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text}


def _answer(value: object, *, boxed: bool = True) -> Message:
    return _said(f"The answer is \\boxed{{{value}}}." if boxed else f"The answer is {value}.")


def calculate(expression: str) -> str:
    try:
        return format_number(evaluate_expression(expression))
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


# Mistakes


def _guess(rng: random.Random, answer: int) -> int:
    """Guess a number about as long as the answer, as a model does that does not calculate."""
    digits = max(1, len(str(abs(answer))) + rng.choice((-1, 0, 0, 1)))
    return rng.randint(10 ** (digits - 1), 10**digits - 1) * (-1 if answer < 0 else 1)


def _wrong_expression(rng: random.Random, expression: str) -> str:
    """Change an operator, drop the last operand, or forget the parentheses.

    No digit is changed: such errors lie on every token, and are the last that training removes.
    """
    signs = [i for i, character in enumerate(expression) if character in "+-*/"]
    mistake = rng.choice(("operator", "operator", "dropped", "parentheses"))
    if mistake == "parentheses" and "(" in expression:
        return expression.replace("(", "").replace(")", "")
    if mistake == "dropped" and len(signs) > 1 and ")" not in expression[signs[-1] :]:
        return expression[: signs[-1]]
    at = rng.choice(signs)
    return expression[:at] + rng.choice("+-*".replace(expression[at], "")) + expression[at + 1 :]


def _changed(rng: random.Random, digits: str) -> str:
    at = rng.randrange(len(digits))
    return digits[:at] + rng.choice("123456789".replace(digits[at], "")) + digits[at + 1 :]


def _failed_call(rng: random.Random, behaviour: str, tool: str, key: str, value: str) -> list[Message]:
    """Make a call that fails, and the message that the model reads about it."""
    if behaviour == "unknown_tool":
        name = rng.choice(MISNAMED[tool])
        others = "price, calculator" if tool == "price" else "calculator"
        return [_calls((name, key, value)), _result(f"error: unknown tool '{name}'; the tools are: {others}")]
    text, error = rng.choice(
        (
            (f'{{"name": "{tool}", "arguments": {{"{key}": "{value}"}}', "Expecting ',' delimiter"),
            (f'{{"name": "{tool}", "arguments": {{"{key}": {value}}}}}', "Expecting value"),
            (f'{{"name": "{tool}", "{key}": "{value}"', "Expecting ',' delimiter"),
        )
    )
    return [
        _said(f"<tool_call>{text}</tool_call>"),
        _result(f"error: invalid JSON in the tool call: {error}"),
    ]


# Conversations


def _demonstrate_math(rng: random.Random, behaviour: str) -> Conversation:
    level = rng.choices((1, 2, 3, 4), (1, 1, 7, 1))[0]
    family = rng.choice(DEMONSTRATED)
    task = math_tasks.draw(rng.getrandbits(48), split="train", level=level, families=[family])
    messages = _opening(rng, math_tasks.SYSTEM_PROMPT, task.question)
    return messages + _calculation(rng, behaviour, task.expression, task.answer), [CALCULATOR]


def _calculation(rng: random.Random, behaviour: str, expression: str, answer: int) -> list[Message]:
    """Make the turns from the question, or the prices, to the answer."""
    messages: list[Message] = []
    boxed = behaviour == "right" or (behaviour != "no_box" and rng.random() < BOXED)
    if behaviour == "guess":
        return [_answer(_guess(rng, answer), boxed=boxed)]
    if behaviour in ("malformed_call", "unknown_tool"):
        messages = _failed_call(rng, behaviour, "calculator", "expression", expression)
        if rng.random() < 0.5:
            return [*messages, _answer(_guess(rng, answer), boxed=boxed)]
    if behaviour == "wrong_expression":
        expression = _wrong_expression(rng, expression)
    result = calculate(expression)
    messages += [_calls(("calculator", "expression", expression)), _result(result)]
    if result.startswith("error"):
        result = str(_guess(rng, answer))
    return [*messages, _answer(result, boxed=boxed)]


def _demonstrate_shop(rng: random.Random, behaviour: str) -> Conversation:
    task = shop_tasks.draw(rng.getrandbits(48), split="train")
    messages = _opening(rng, shop_tasks.SYSTEM_PROMPT, task.question)
    tools = [PRICE, CALCULATOR]
    items = list(task.basket)
    if behaviour == "guess" and rng.random() < 0.5:  # the other half guesses once the prices are known
        return [*messages, _answer(_guess(rng, task.answer), boxed=rng.random() < BOXED)], tools
    if behaviour in ("malformed_call", "unknown_tool") and rng.random() < 0.7:
        messages += _failed_call(rng, behaviour, "price", "item", items[0])
        if rng.random() < 0.5:
            return [*messages, _answer(_guess(rng, task.answer), boxed=rng.random() < BOXED)], tools
        behaviour = "right" if rng.random() < BOXED else "no_box"
    for turn in [items] if rng.random() < 0.5 else [[item] for item in items]:
        messages.append(_calls(*(("price", "item", item) for item in turn)))
        messages += [_result(str(task.prices[item])) for item in turn]
    return messages + _calculation(rng, behaviour, task.expression, task.answer), tools


def _demonstrate_symbol(rng: random.Random, behaviour: str) -> Conversation:
    task = symbols.draw(rng.getrandbits(48), split="train")
    answer = task.solution
    if behaviour == "guess":
        answer = _changed(rng, answer)
    if behaviour == "other_question":
        answer = rng.choice(task.numbers)
    messages = _opening(rng, symbols.SYSTEM_PROMPT, task.prompt)
    boxed = behaviour == "right" or (behaviour != "no_box" and rng.random() < BOXED)
    return [*messages, _answer(answer, boxed=boxed)], []


def _demonstrate_copy(rng: random.Random) -> Conversation:
    """Demonstrate copying digits, which takes longest to learn; here nothing else is asked."""
    text = "".join(rng.choices("0123456789+-*/()", (4,) * 10 + (1,) * 6, k=rng.randint(4, 24)))
    return [{"role": "user", "content": f"Copy: {text}"}, _said(text)], []
