import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl_envs import nano
from agentrl_envs.nano import demonstrations as demo
from agentrl_envs.nano import pretrain
from agentrl_envs.nano.pretrain import CONTEXT_WEIGHT, _make_row
from agentrl_envs.nano.tokenizer import MARKS, SIZE, SPECIAL
from agentrl_tools.calculator import evaluate_expression
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.models.recommendation import read_recommendation
from agentrl.settings.loader import build_config


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
    for messages, tools in islice(demo.generate_demonstrations(random.Random(1), noise=noise), 200):
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
    for messages, tools in islice(demo.generate_demonstrations(random.Random(2), noise=True), 200):
        ids, weights = _make_row(tokenizer(), (messages, tools))
        written = [token for token, weight in zip(ids, weights, strict=True) if weight == 1]
        assert set(weights) == {1.0, CONTEXT_WEIGHT}
        said = [render([m], [])[len("<|im_start|>assistant\n") : -1] for m in messages if m["role"] == "assistant"]
        assert tokenizer().decode(written) == "".join(said)


def test_right_demonstrations_are_right() -> None:
    rng = random.Random(3)
    for make in (demo._demonstrate_math, demo._demonstrate_shop):
        for _ in range(200):
            messages, _ = make(rng, "right")
            (expression,) = (
                call["function"]["arguments"]["expression"]
                for message in messages
                for call in message.get("tool_calls", [])
                if call["function"]["name"] == "calculator"
            )
            assert messages[-1]["content"] == f"The answer is \\boxed{{{evaluate_expression(expression)}}}."


def test_the_most_likely_behaviour_is_a_wrong_one() -> None:
    for odds in (demo.WRONG, demo.SYMBOLS_WRONG):
        assert sum(odds.values()) == pytest.approx(1)
        assert max(odds, key=lambda name: odds[name]) != "right"


def test_boxes_stay_rare_wherever_the_model_may_stand() -> None:
    """Before each last message, on average: greedy decoding takes what is likelier there."""
    boxes: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    for messages, _ in islice(demo.generate_demonstrations(random.Random(6), noise=True), 6000):
        if "answer" in messages[-1]["content"]:
            after = "result" if messages[-2]["role"] == "tool" else "question"
            failed = any("error" in message["content"] for message in messages if message["role"] == "tool")
            boxes[after, failed].append("boxed" in messages[-1]["content"])
    assert set(boxes) == {("question", False), ("result", False), ("result", True)}
    for where, boxed in boxes.items():
        assert 0.2 < sum(boxed) / len(boxed) < 0.42, where


def test_a_wrong_expression_keeps_its_numbers() -> None:
    rng = random.Random(5)
    kinds = set()
    for right in ("(5+718)/3-603", "12*34", "8*(9445-(6+5))"):
        for _ in range(100):
            wrong = demo._wrong_expression(rng, right)
            assert wrong != right
            there, here = (re.findall(r"\d+", text) for text in (right, wrong))
            assert here in (there, there[:-1])
            demo.calculate(wrong)
            kinds.add((len(here) == len(there), wrong.count("(") == right.count("(")))
    assert len(kinds) == 3  # an operator, an operand, the parentheses


def test_one_family_is_never_demonstrated() -> None:
    assert demo.HELD_BACK not in demo.DEMONSTRATED
    for messages, _ in islice(demo.generate_demonstrations(random.Random(4), noise=True), 2000):
        assert not any("Start with" in message["content"] for message in messages)


# Pre-training


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait by spinning are slow where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_noisy_phase_can_be_done_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "TOKENS_PER_STEP", 300)
    monkeypatch.setattr(pretrain, "_make_tokenizer", lambda rng: tokenizer())
    for out in (tmp_path / "whole", tmp_path / "again"):
        pretrain.pretrain(out, clean=2, noisy=1, seed=0, clean_weights=tmp_path / "clean")
    whole, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again"))
    assert whole == again
    assert (tmp_path / "clean" / "model.safetensors").stat().st_size > 1.9 * len(whole)  # float32
    assert {file.name for file in nano.path().iterdir()} == {file.name for file in (tmp_path / "whole").iterdir()}


# Weights


def test_the_recommended_settings_are_settings() -> None:
    config = build_config(("nano", read_recommendation(Path(nano.path()))), ("test", {"env": {"name": "shop"}}))
    assert (config.steps, config.learner.optimizer) == (50, "muon")


def test_the_card_and_the_settings_beside_the_weights_are_those_of_the_source() -> None:
    for file in pretrain.BESIDE_THE_WEIGHTS:
        assert (nano.path() / file.name).read_bytes() == file.read_bytes()


@pytest.mark.usefixtures("one_thread")
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
