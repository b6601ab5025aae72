"""Chat templates as the model families ship them, and tokenizers of their kinds, trained here on a few lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentrl_envs import nano
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl.renderer.template import TemplateRenderer

CORPUS = [
    "The weather in Paris is 21 degrees and sunny; in Oslo it is 4 degrees, with rain from the west.",
    "system user assistant tool tools function functions name arguments parameters type object string number",
    '{"name": "search", "arguments": {"query": "population of Paris", "limit": 10}} {"result": 2102650, "ok": true}',
    "You are a helpful assistant. Answer with a number. What is the answer? The answer is 42.",
    "def main():\n    for i in range(10):\n        print(i)\n\nif __name__ == '__main__':\n    main()\n",
    "think tool_call tool_response im_start im_end end_of_turn start_header_id INST TOOL_RESULTS eot_id observation",
    "<a><b></c> <|x|> [Y] < | > [ ] / \\ error: file not found (code 404) https://example.org/a?b=c&d=e",
    "Zürich, São Paulo, 東京, Москва, naïve café — “quoted” … 🙂 1+2*(3-4)/5=-7.5",
] * 3

QWEN_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    tokenizer: Any
    native: bool = False  # it shows tools, and writes calls
    keeps: bool = True  # the rendering of a history is the concatenation of its turns
    closer: str = ""  # ends the model's turn
    system: bool = True

    @property
    def added(self) -> list[str]:
        return [t.content for t in self.tokenizer.added_tokens_decoder.values()]

    def renderer(self) -> TemplateRenderer:
        return TemplateRenderer(self.tokenizer)


# Tokenizers


def build_byte_level(added: list[AddedToken], normalizer: Any = None, pattern: str = QWEN_REGEX) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    if normalizer is not None:
        bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    bpe.add_tokens(added)
    return bpe


def _sentencepiece(control: list[str], added: list[AddedToken], normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """BPE over characters with byte fallback; the control tokens stand in the vocabulary, as they do there."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*control, *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    state: Any = json.loads(bpe.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    bpe = Tokenizer.from_str(json.dumps(state))
    bpe.normalizer = normalizer
    if pre_tokenizer is not None:
        bpe.pre_tokenizer = pre_tokenizer
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence(steps)
    bpe.add_tokens(added)
    return bpe


def _wrap(bpe: Tokenizer, template: str, eos: str, **special: Any) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=eos, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = template
    return tokenizer


def _special(*contents: str) -> list[AddedToken]:
    return [AddedToken(c, special=True, normalized=False) for c in contents]


def _plain(*contents: str) -> list[AddedToken]:
    return [AddedToken(c, special=False, normalized=False) for c in contents]


# Qwen

_QWEN_TOOLS = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501

QWEN25 = (
    _QWEN_TOOLS
    + r"""{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""  # noqa: E501
)

QWEN3 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501

_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box_start|>", "<|box_end|>")
_QWEN_MARKS = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>")


def _qwen(template: str, *more: str) -> Any:
    added = [*_special(*_QWEN_SPECIAL), *_plain(*_QWEN_MARKS, *more)]
    return _wrap(build_byte_level(added, normalizers.NFC()), template, "<|im_end|>", pad_token="<|endoftext|>")


# Llama 3.1

LLAMA31 = r"""{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- set date_string = "26 Jul 2024" %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call " }}
    {{- "with its proper arguments that best answers the given prompt.\n\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- "Do not use variables.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""  # noqa: E501

# Llama's turns with Hermes' calls (as in Hermes-3-Llama-3.1, which keeps Llama's header tokens): results are JSON.
HERMES_LLAMA = LLAMA31.replace(
    """        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
""",
    """        {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}\\n</tool_call>" }}
""",
).replace("message.tool_calls|length == 1", "message.tool_calls|length >= 1")


def _llama(template: str, *more: str) -> Any:
    specials = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    added = [*_special(*specials, "<|eom_id|>", "<|python_tag|>", "<|reserved_special_token_0|>"), *_plain(*more)]
    pattern = QWEN_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
    return _wrap(build_byte_level(added, None, pattern), template, "<|eot_id|>", bos_token="<|begin_of_text|>")


# Mistral 7B v0.3

MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501


def _mistral() -> Any:
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    control += ["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    legacy = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe = _sentencepiece(control, [], legacy, None)
    return _wrap(bpe, MISTRAL, "</s>", bos_token="<s>", unk_token="<unk>")


# Gemma 2

GEMMA = (
    r"{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    r"{{ raise_exception('System role not supported') }}{% endif %}"
    r"{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    r"{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    r"{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    r"{% else %}{% set role = message['role'] %}{% endif %}"
    r"{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)


def _gemma() -> Any:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    marks = _plain("<mask>", "<2mass>", "[@BOS@]", "<table>", "<b>", "</b>", *("\n" * i for i in range(2, 6)))
    bpe = _sentencepiece(control, [*marks, *_plain("▁▁", "▁▁▁")], normalizers.Replace(" ", "▁"), None)
    return _wrap(bpe, GEMMA, "<eos>", bos_token="<bos>", pad_token="<pad>", unk_token="<unk>")


# GLM 4.5

GLM = r"""[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
...
</tool_call>{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {% set ns.last_user_index = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- else %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\n<think>' + reasoning_content.strip() +  '</think>'}}
{%- else -%}
{{ '\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}
    {%- set tc = tc.function %}
{%- endif %}
{{ '\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\n<tool_response>\n' }}
{{- m.content }}
{{- '\n</tool_response>' }}
{%- endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""  # noqa: E501


def _glm() -> Any:
    roles = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    args = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
    added = [*_special("<|endoftext|>", "[gMASK]", "[sMASK]", "<sop>", "<eop>", *roles), *_plain(*marks, *args)]
    return _wrap(build_byte_level(added), GLM, "<|endoftext|>", pad_token="<|endoftext|>")


# Nano, and odd ones

NANO = Path(nano.__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def _nano() -> Any:
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    added = [*_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), *_plain(*marks)]
    return _wrap(build_byte_level(added), NANO, "<|im_end|>", pad_token="<|endoftext|>")


def _odd() -> Any:
    """Tokens that strip, that match after normalisation, of one character, overlapping; Phi's `<|end|>` eats space."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    roles = [AddedToken(f"<|{r}|>", special=True, normalized=False, rstrip=True) for r in ("system", "user", "tool")]
    added = [
        AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
        AddedToken("<|assistant|>", special=True, normalized=False, rstrip=True),
        AddedToken("<mask>", special=True, normalized=False, lstrip=True),
        AddedToken("<think>", special=False, normalized=True),
        AddedToken("<both>", special=False, normalized=True, lstrip=True, rstrip=True),
        *_plain("☃", "<a>", "a><b", "<b>", "aa", "aaaa"),
        AddedToken("[WORD]", special=False, normalized=False, single_word=True),
    ]
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return _wrap(build_byte_level([*roles, *added], normalizer), template, "<|end|>")


def _metaspace() -> Any:
    """Sentencepiece without byte fallback: rare characters become `<unk>`; a space before the first word only."""
    template = "{% for m in messages %}{{ '<r>' + m.role + '\n' + m.content + '</s>' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ '<r>assistant\n' }}{% endif %}"
    )
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>", "<r>"]
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    return _wrap(bpe, template, "</s>", unk_token="<unk>")


NAMES = ("qwen2.5", "qwen3", "llama3.1", "hermes-llama", "mistral", "gemma", "glm4.5", "nano", "odd", "metaspace")


@cache
def family(name: str) -> Family:
    qwen3 = ("<tool_response>", "</tool_response>", "<think>", "</think>")
    match name:
        case "qwen2.5":
            return Family(_qwen(QWEN25), native=True, closer="<|im_end|>")
        case "qwen3":
            return Family(_qwen(QWEN3, *qwen3), native=True, closer="<|im_end|>", keeps=False)
        case "llama3.1":
            return Family(_llama(LLAMA31), native=True, closer="<|eot_id|>")
        case "hermes-llama":
            return Family(_llama(HERMES_LLAMA, "<tool_call>", "</tool_call>"), native=True, closer="<|eot_id|>")
        case "mistral":
            return Family(_mistral(), native=True, keeps=False, closer="</s>", system=False)
        case "gemma":
            return Family(_gemma(), closer="<end_of_turn>", system=False)
        case "glm4.5":
            return Family(_glm(), native=True, keeps=False)
        case "nano":
            return Family(_nano(), native=True, closer="<|im_end|>")
        case "odd":
            return Family(_odd(), closer="<|end|>")
        case "metaspace":
            return Family(_metaspace(), closer="</s>")
    raise ValueError(name)


# Families whose turns are plain text

PLAIN = {
    "vicuna": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}"
        "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
        "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
        "{% else %}{{ '### Response:\n' + m.content + eos_token + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
    "guanaco": (
        "{% for m in messages %}{{ '### ' + ('Human' if m.role == 'user' else 'Assistant') + ': ' + m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Assistant: ' }}{% endif %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' }}"
        "{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "bare": (
        "{% for m in messages %}{{ m.role + '\n' + m.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    ),
}


@cache
def plain_family(name: str) -> Family:
    """One of the templates above, with a tokenizer that has no tokens but an end and a beginning."""
    bpe = build_byte_level(_special("<s>", "</s>"))
    return Family(_wrap(bpe, PLAIN[name], "</s>", bos_token="<s>"), closer="</s>")
