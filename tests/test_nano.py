import json
import os
import random
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from agentrl_envs import nano
from agentrl_envs.math_tasks import evaluate
from agentrl_envs.nano import demonstrations as demo
from agentrl_envs.nano.pretrain import CONTEXT_WEIGHT, row
from agentrl_envs.nano.tokenizer import MARKS, SIZE, SPECIAL
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(nano.path())


def render(messages: list[demo.Message], tools: list[dict[str, Any]], **how: Any) -> str:
    text = tokenizer().apply_chat_template(messages, tools=tools or None, tokenize=False, **how)
    assert isinstance(text, str)
    return text


# Tokenizer


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text


def test_every_byte_has_a_token() -> None:
    text = "".join(map(chr, [*range(0x250), 0x4E2D, 0x1F600, 0x10FFFF]))
    assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text


def test_digits_and_operators_stand_alone() -> None:
    assert tokenizer().tokenize("12+34*(5-6)/7=8") == list("12+34*(5-6)/7=8")


def test_the_vocabulary() -> None:
    assert len(tokenizer()) == SIZE
    assert tokenizer().eos_token == "<|im_end|>"
    assert tokenizer().pad_token == "<|endoftext|>"
    for mark in (*SPECIAL, *MARKS):
        ids = tokenizer()(mark)["input_ids"]
        assert len(ids) == 1
        assert tokenizer().decode(ids, skip_special_tokens=True) == (mark if mark in MARKS else "")


# Template


def test_a_conversation_as_text() -> None:
    messages = [
        {"role": "system", "content": "Be right."},
        {"role": "user", "content": "What is 1+2?"},
        demo._calls(("calculator", "expression", "1+2"), ("price", "item", "hat")),
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "14"},
        {"role": "assistant", "content": "3."},
    ]
    assert render(messages, [demo.CALCULATOR, demo.PRICE], add_generation_prompt=True) == (
        "<|im_start|>system\nBe right.\nTools: calculator(expression: string) price(item: string)<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>'
        '<tool_call>{"name": "price", "arguments": {"item": "hat"}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>3</tool_response><tool_response>14</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n3.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_may_be_the_json_text_of_openai() -> None:
    spoken, written = (demo._calls(("calculator", "expression", "1+2")) for _ in range(2))
    function = written["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert render([spoken], []) == render([written], [])


def test_odd_messages_render() -> None:
    assert render([{"role": "assistant", "content": None}], []) == "<|im_start|>assistant\n<|im_end|>\n"
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert "Tools: now()<|im_end|>" in render([{"role": "user", "content": "Hi"}], [tool])
    bare = {"type": "function", "function": {"name": "now"}}
    assert "Tools: now()<|im_end|>" in render([{"role": "user", "content": "Hi"}], [bare])


@pytest.mark.parametrize("noise", [False, True])
def test_the_template_only_ever_appends(noise: bool) -> None:
    for messages, tools in islice(demo.demonstrations(random.Random(1), noise=noise), 200):
        whole = render(messages, tools)
        for end in range(1, len(messages) + 1):
            next_is_tool = end < len(messages) and messages[end]["role"] == "tool"
            if messages[end - 1]["role"] == "tool" and next_is_tool:
                continue  # results of one turn are one block
            assert whole.startswith(render(messages[:end], tools))
            if end < len(messages) and messages[end]["role"] == "assistant":
                assert whole.startswith(render(messages[:end], tools, add_generation_prompt=True))


# Demonstrations


def test_what_the_model_writes_is_what_is_trained() -> None:
    for messages, tools in islice(demo.demonstrations(random.Random(2), noise=True), 200):
        ids, weights = row(tokenizer(), (messages, tools))
        written = [token for token, weight in zip(ids, weights, strict=True) if weight == 1]
        assert set(weights) == {1.0, CONTEXT_WEIGHT}
        said = [render([m], [])[len("<|im_start|>assistant\n") : -1] for m in messages if m["role"] == "assistant"]
        assert tokenizer().decode(written) == "".join(said)


def test_right_demonstrations_are_right() -> None:
    rng = random.Random(3)
    for make in (demo.math, demo.shop):
        for _ in range(200):
            messages, _ = make(rng, "right")
            (expression,) = (
                call["function"]["arguments"]["expression"]
                for message in messages
                for call in message.get("tool_calls", [])
                if call["function"]["name"] == "calculator"
            )
            assert messages[-1]["content"] == f"The answer is \\boxed{{{evaluate(expression)}}}."


def test_the_most_likely_behaviour_is_a_wrong_one() -> None:
    for odds in (demo.WRONG, demo.SYMBOLS_WRONG):
        assert sum(odds.values()) == pytest.approx(1)
        assert max(odds, key=lambda name: odds[name]) != "right"


def test_one_family_is_never_demonstrated() -> None:
    assert demo.HELD_BACK not in demo.DEMONSTRATED
    for messages, _ in islice(demo.demonstrations(random.Random(4), noise=True), 2000):
        assert not any("Start with" in message["content"] for message in messages)


# Weights


def test_the_shipped_model_loads_and_speaks() -> None:
    model = AutoModelForCausalLM.from_pretrained(nano.path()).float()
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert 1.0e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    question = [{"role": "user", "content": "What is 12+34?"}]
    prompt = tokenizer().apply_chat_template(
        question, tools=[demo.CALCULATOR], add_generation_prompt=True, return_tensors="pt"
    )
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    text = tokenizer().decode(out[0, prompt["input_ids"].shape[1] :])
    assert '{"name": "calculator", "arguments": {"expression": "12+34"}}' in text
    assert text.endswith("<|im_end|>")


def test_the_shipped_files_are_small_and_readable() -> None:
    files = list(nano.path().iterdir())
    assert {"README.md", "chat_template.jinja", "config.json", "model.safetensors"} <= {f.name for f in files}
    assert sum(f.stat().st_size for f in files) < 2.4e6
    assert all(os.access(f, os.R_OK) and f.stat().st_mode & 0o044 == 0o044 for f in files)
