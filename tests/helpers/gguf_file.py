"""nano, or another small Llama, written as a GGUF file by the package that llama.cpp's people make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentrl.models.source import locate_model

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, **changed: Any) -> Any:
    """Write a random Llama over nano's tokenizer; return it as transformers has it."""
    import gguf

    tokenizer = AutoTokenizer.from_pretrained(locate_model("nano"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(changed.get("block_count", config.num_hidden_layers))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(changed.get("embedding_length", config.hidden_size))
    writer.add_feed_forward_length(changed.get("feed_forward_length", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        if own := _rename(name):
            writer.add_tensor(own, _permute(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import gguf

    own = json.loads(tokenizer.backend_tokenizer.to_str())
    control = {token["content"] for token in own["added_tokens"]}
    words = [word for word, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    kinds = [gguf.TokenType.CONTROL if word in control else gguf.TokenType.NORMAL for word in words]
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in own["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)  # none of its own; files have one all the same
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _rename(name: str) -> str | None:
    """Return llama.cpp's name of a tensor."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    whole["lm_head.weight"] = "output.weight"
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _permute(name: str, tensor: Any, config: Any) -> Any:
    """Order the rows of queries and keys as llama.cpp's rotation has them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if part in name), None)
    if count is None:
        return tensor
    rows, width = tensor.shape
    return tensor.reshape(count, 2, rows // count // 2, width).swapaxes(1, 2).reshape(rows, width).contiguous()
