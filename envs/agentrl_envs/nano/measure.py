"""The measurement of nano: python -m agentrl_envs.nano.measure [DIR] prints rewards on held-out tasks.

A loop of its own, in batches and with no framework, so that the numbers on the card depend on little.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentrl_envs import math_tasks, nano, shop_tasks, symbols
from agentrl_envs.nano.demonstrations import CALCULATOR, PRICE, calculate
from agentrl_envs.splits import Split

MAX_TURNS, MAX_NEW_TOKENS = 5, 64
TESTED = (*math_tasks.FAMILIES, "shop", "symbols")

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NEXT = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class _Episode:
    system: str
    question: str
    answer: str
    tools: dict[str, Callable[[str], str]] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)  # by the model, for each id
    valid_calls: int = 0
    failed_calls: int = 0
    last: str = ""  # what the model said last

    @property
    def correct(self) -> bool:
        boxes = _BOXED.findall(self.last)
        return bool(boxes) and boxes[-1].strip() == self.answer

    def add(self, ids: Sequence[int], *, written: bool) -> None:
        self.ids += ids
        self.written += [written] * len(ids)


def _start_episode(family: str, seed: int, split: Split) -> _Episode:
    if family == "symbols":
        task = symbols.draw(seed, split=split)
        return _Episode(symbols.SYSTEM_PROMPT, task.prompt, task.solution)
    if family == "shop":
        shop = shop_tasks.draw(seed, split=split)
        tools = {"price": lambda item: str(shop.price(item) or "error: not sold here"), "calculator": calculate}
        return _Episode(shop_tasks.SYSTEM_PROMPT, shop.question, str(shop.answer), tools, [PRICE, CALCULATOR])
    sum_ = math_tasks.draw(seed, split=split, families=[family])
    tools = {"calculator": calculate}
    return _Episode(math_tasks.SYSTEM_PROMPT, sum_.question, str(sum_.answer), tools, [CALCULATOR])


def _answer_call(text: str, talk: _Episode) -> str:
    """Answer one call."""
    try:
        call = json.loads(text)
        (argument,) = call["arguments"].values()
        reply = talk.tools[call["name"]](argument)
    except json.JSONDecodeError as error:
        talk.failed_calls += 1
        return f"error: invalid JSON in the tool call: {error}"
    except (KeyError, ValueError, TypeError, AttributeError):
        talk.failed_calls += 1
        return f"error: unknown tool; the tools are: {', '.join(talk.tools)}"
    talk.valid_calls += 1
    return reply


@torch.no_grad()
def _play(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, talks: Sequence[_Episode], *, greedy: bool
) -> None:
    for talk in talks:
        messages = [{"role": "system", "content": talk.system}, {"role": "user", "content": talk.question}]
        text = tokenizer.apply_chat_template(
            messages, tools=talk.schemas or None, add_generation_prompt=True, tokenize=False
        )
        talk.add(tokenizer(text)["input_ids"], written=False)
    waiting = list(talks)
    for _ in range(MAX_TURNS):
        replies = _generate(model, tokenizer, [talk.ids for talk in waiting], greedy=greedy)
        asked = []
        for talk, reply in zip(waiting, replies, strict=True):
            talk.add(reply, written=True)
            talk.last = tokenizer.decode(reply)
            results = [_answer_call(call, talk) for call in _CALL.findall(talk.last)]
            if results and reply[-1] == tokenizer.eos_token_id:
                text = "".join(f"<tool_response>{result}</tool_response>" for result in results)
                talk.add(tokenizer(_NEXT.format(text))["input_ids"], written=False)
                asked.append(talk)
        waiting = asked
        if not waiting:
            return


def _generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], *, greedy: bool
) -> Iterator[list[int]]:
    longest = max(map(len, prompts))
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, **how)
    for new in out[:, longest:].tolist():
        yield new[: new.index(eos) + 1] if eos in new else new


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: str, tasks: int, split: Split) -> str:
    sampled, greedy = ([_start_episode(family, seed, split) for seed in range(tasks)] for _ in range(2))
    torch.manual_seed(0)
    _play(model, tokenizer, sampled, greedy=False)
    _play(model, tokenizer, greedy, greedy=True)
    columns = (
        [talk.correct for talk in sampled],
        [talk.correct for talk in greedy],
        [talk.valid_calls > 0 for talk in sampled],
        [talk.failed_calls > 0 for talk in sampled],
        [talk.valid_calls + talk.failed_calls for talk in sampled],
        [len(talk.ids) for talk in sampled],
    )
    return f"{family:12}" + "".join(f"{sum(column) / tasks:10.3f}" for column in columns)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=nano.path())
    parser.add_argument("--tasks", type=int, default=200, help="of each family")
    parser.add_argument("--split", choices=("train", "test"), default="test")
    arguments = parser.parse_args()
    model, tokenizer = _load(arguments.folder)
    print("family         sampled    greedy     valid    failed     calls    tokens")
    for family in TESTED:
        print(_measure(model, tokenizer, family, arguments.tasks, arguments.split), flush=True)


if __name__ == "__main__":
    _main()
