"""vLLM's names: engine arguments, sampling parameters, and those of ``vllm serve``."""

from __future__ import annotations

from agentrl.settings.names.convert import convert_revision, convert_stop, convert_top_k
from agentrl.settings.names.foreign import ForeignName, absent, here, nothing

_WHOLE = "the learner has no counterpart of it, and what is sampled must be what it computes"
_OWN = "vLLM's own choice"
_ONE = "in process vLLM has one GPU; agentrl serve has --tp, --dp and --vllm.FLAG, for engine.urls"
_LORA = "an adapter is sent to vLLM where lora.rank is set"
_SERVE = "agentrl serve starts a server; --host, --port and --api_key_env are its own"

VLLM_NAMES: tuple[ForeignName, ...] = (
    here("n", 1, "rollout.group_size"),
    here("max_tokens", 16, "rollout.max_tokens"),
    here("top_p", 1.0, "rollout.top_p"),
    here("top_k", 0, "rollout.top_k", "-1 is 0: all tokens", convert_top_k),
    here("min_p", 0.0, "rollout.min_p"),
    here("repetition_penalty", 1.0, "rollout.repetition_penalty"),
    here("max_num_seqs", 256, "engine.max_num_seqs"),
    here("max_model_len", None, "engine.max_model_len"),
    nothing(
        "gpu_memory_utilization",
        0.92,
        "engine.gpu_share, of a GPU that the learner shares; by default what it leaves",
    ),
    nothing("enforce_eager", False, _OWN),
    nothing("max_num_batched_tokens", None, _OWN),
    nothing("enable_prefix_caching", None, "prefixes are cached, and forgotten when the weights change"),
    nothing("enable_chunked_prefill", None, _OWN),
    nothing("block_size", None, _OWN),
    nothing("swap_space", 4, _OWN),
    nothing("cpu_offload_gb", 0, _OWN),
    nothing("kv_cache_dtype", "auto", _OWN),
    nothing("load_format", "auto", "vLLM is sent the weights"),
    nothing("enable_sleep_mode", False, "vLLM sleeps where the learner shares its GPU"),
    nothing("disable_log_stats", False, "what the engine does is in metrics.jsonl"),
    nothing("logprobs", None, "the logprob of every sampled token is kept"),
    nothing("logprobs_mode", "raw_logprobs", "logprobs are of the distribution that is sampled from"),
    nothing("enable_return_routed_experts", False, "learner.router_replay asks vLLM for them"),
    nothing("enable_lora", False, _LORA),
    nothing("max_lora_rank", 16, _LORA),
    nothing("max_loras", 1, _LORA),
    nothing("served_model_name", None, _SERVE),
    nothing("api_key", None, _SERVE),
    nothing("host", None, _SERVE),
    nothing("port", 8000, _SERVE),
    nothing("enable_auto_tool_choice", False, "calls are read by the model's template"),
    nothing("tool_call_parser", None, "calls are read by the model's template; agentrl serve has --tool_parser"),
    absent("tensor_parallel_size", 1, _ONE),
    absent("pipeline_parallel_size", 1, _ONE),
    absent("data_parallel_size", 1, _ONE),
    absent("distributed_executor_backend", None, _ONE),
    absent("quantization", None, "weights are those that are trained; beside an adapter lora.quantize = 4bit"),
    absent("speculative_config", None, "tokens are sampled from the policy itself"),
    absent("tokenizer", None, "the tokenizer is the model's own"),
    here("revision", None, "load.revision", "main is the newest", convert_revision),
    nothing("tokenizer_revision", None, "the tokenizer is of the model's revision"),
    here("stop", None, "rollout.stop", "a text is one string; strings in a list", convert_stop),
    here("stop_strings", None, "rollout.stop", "transformers' name for stop", convert_stop),
    here("structured_outputs", None, "rollout.structured_outputs", "regex or json"),
    absent("guided_decoding", None, "its name is structured_outputs, and rollout.structured_outputs here"),
    absent("stop_token_ids", None, "a turn ends at the model's own end tokens", []),
    absent("ignore_eos", False, "a turn ends at the model's own end token"),
    absent("min_tokens", 0, _WHOLE),
    absent("presence_penalty", 0.0, _WHOLE),
    absent("frequency_penalty", 0.0, _WHOLE),
    absent("logit_bias", None, _WHOLE),
    absent("allowed_token_ids", None, _WHOLE),
    absent("bad_words", None, _WHOLE),
    absent("best_of", None, _WHOLE, 1),
    absent("limit_mm_per_prompt", None, "episodes are text"),
    absent("reasoning_parser", None, "a thought is part of the reply; env.thought_marks, where a reward looks past it"),
)
