"""The tokenizer of nano: byte-level BPE of 512 tokens in which every digit and operator stands alone."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SIZE = 512
CONTEXT = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Added but not special, as in Qwen3: they are part of the text that a model writes.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"[+\-*/()=]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer
