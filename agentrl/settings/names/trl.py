"""TRL's names: the fields of ``GRPOConfig`` (1.16), the arguments of ``GRPOTrainer`` and of ``trl grpo``."""

from __future__ import annotations

from agentrl.settings.names.convert import (
    convert_dtype,
    convert_regex,
    convert_revision,
    convert_rewards,
    convert_table,
    convert_targets,
    convert_tool_iterations,
    convert_top_k,
    convert_truncated,
)
from agentrl.settings.names.foreign import ForeignName, absent, here, joint, nothing

_SERVERS = "a model over several GPUs is agentrl serve --tp N, for engine.urls"
_EMBEDDED = "the embedded engine batches continuously by itself"
_SEND = "weights go to servers over a group that agentrl makes itself"
_IMAGES = "episodes are text"
_HUB = "every completion lies in the run folder's trajectories/; agentrl report writes a page to share"
_ADAPTIVE = "there is no adaptive entropy; learner.entropy_coef is fixed"
_LOSS = "the loss has TRL's default values built in; another value needs a loss of your own (docs/algorithms.md)"
_OWN_ENV = "an environment is a class here: docs/write-an-environment.md"

GRPO_FIELDS: tuple[ForeignName, ...] = (
    # the model
    joint("model_init_kwargs", None, "dtype", "its dtype; what else is in it is looked up by its own name"),
    here("trust_remote_code", False, "load.trust_remote_code"),
    here("router_aux_loss_coef", None, "learner.router_aux_loss_coef"),
    nothing("disable_dropout", False, "a policy never drops out: sampling and learning are the same function"),
    here("cast_lm_head_to_fp32", False, "learner.cast_lm_head_to_fp32"),
    # data
    here("num_generations", 8, "rollout.group_size"),
    here("num_generations_eval", None, "eval.trials", "beside the greedy trial"),
    joint("max_completion_length", 512, "rollout.max_episode_tokens", "and rollout.max_tokens, of one turn"),
    nothing("ds3_gather_for_generation", True, "weights are not sharded"),
    absent("shuffle_dataset", True, "each pass over the tasks has an order of its own, drawn from the seed"),
    nothing("pad_to_multiple_of", "auto", "what rows begin with alike is computed once; padding is the packing's own"),
    # sampling
    joint("generation_batch_size", None, "rollout.tasks_per_step", "in groups: divided by num_generations"),
    joint("steps_per_generation", None, "rollout.tasks_per_step", "and learner.steps_per_generation"),
    here("temperature", 1.0, "rollout.temperature"),
    here("top_p", 1.0, "rollout.top_p"),
    here("top_k", 0, "rollout.top_k", "-1 is 0: all tokens", convert_top_k),
    here("min_p", None, "rollout.min_p"),
    nothing("generation_kwargs", None, "what is in it is looked up by its own name"),
    here("chat_template_kwargs", None, "template", "words that the chat template reads", convert_table),
    here("repetition_penalty", 1.0, "rollout.repetition_penalty"),
    nothing("cache_implementation", None, "the embedded engine has a cache of its own"),
    # vLLM
    joint("use_vllm", False, "engine.name", "true: vllm or, by vllm_mode, server; false: transformers"),
    joint("vllm_mode", "colocate", "engine.name", "colocate is vllm, server is server"),
    nothing("vllm_model_impl", "vllm", "vLLM chooses its implementation"),
    nothing("vllm_enable_sleep_mode", False, "vLLM sleeps where the learner shares its GPU"),
    here(
        "vllm_structured_outputs_regex",
        None,
        "rollout.structured_outputs",
        "is its regex",
        convert_regex,
    ),
    joint("vllm_server_base_url", None, "engine.urls"),
    joint("vllm_server_host", "0.0.0.0", "engine.urls", "with vllm_server_port"),
    joint("vllm_server_port", 8000, "engine.urls", "with vllm_server_host"),
    nothing("vllm_server_timeout", 240.0, "a server that does not answer is named at once; agentrl serve waits for it"),
    nothing("vllm_group_port", 51216, _SEND),
    nothing(
        "vllm_gpu_memory_utilization",
        0.3,
        "engine.gpu_share, of a GPU that the learner shares; by default what it leaves",
    ),
    here("vllm_max_model_length", None, "engine.max_model_len"),
    absent(
        "vllm_tensor_parallel_size",
        1,
        _SERVERS,
    ),
    # the objective
    here("beta", 0.0, "learner.beta"),
    here("num_iterations", 1, "learner.num_iterations"),
    joint("epsilon", 0.2, "learner.epsilon", "and learner.epsilon_high, where epsilon_high is not given"),
    here("delta", None, "learner.delta"),
    joint("epsilon_high", None, "learner.epsilon_high", "None is epsilon"),
    absent("sapo_temperature_neg", 1.05, _LOSS),
    absent("sapo_temperature_pos", 1.0, _LOSS),
    absent("vespo_k_pos", 2.0, _LOSS),
    absent("vespo_lambda_pos", 3.0, _LOSS),
    absent("vespo_k_neg", 3.0, _LOSS),
    absent("vespo_lambda_neg", 2.0, _LOSS),
    here("importance_sampling_level", "token", "learner.importance_level"),
    here("reward_weights", None, "env.reward_weights"),
    joint("multi_objective_aggregation", "sum_then_normalize", "learner.advantage", "normalize_then_sum is gdpo"),
    joint("scale_rewards", "group", "learner.advantage", "group is grpo, none is dr_grpo, batch is batch"),
    here("loss_type", "dapo", "learner.loss"),
    here(
        "mask_truncated_completions",
        False,
        "learner.mask_stop_reasons",
        "true is max_tokens",
        convert_truncated,
    ),
    joint("sync_ref_model", False, "learner.ref_sync_steps"),
    joint("ref_model_mixup_alpha", 0.6, "learner.ref_mixup_alpha", "where sync_ref_model is true"),
    joint("ref_model_sync_steps", 512, "learner.ref_sync_steps", "where sync_ref_model is true"),
    here("top_entropy_quantile", 1.0, "learner.top_entropy_quantile"),
    here("entropy_coef", 0.0, "learner.entropy_coef"),
    absent("use_adaptive_entropy", False, _ADAPTIVE),
    nothing("entropy_coef_min", 0.0, _ADAPTIVE),
    nothing("entropy_coef_max", 1.0, _ADAPTIVE),
    nothing("entropy_coef_delta", 0.005, _ADAPTIVE),
    nothing("entropy_target", 0.2, _ADAPTIVE),
    here(
        "max_tool_calling_iterations",
        None,
        "rollout.max_turns",
        "and one more, for the answer",
        convert_tool_iterations,
    ),
    joint("vllm_importance_sampling_correction", True, "learner.importance_sampling_mode"),
    here("vllm_importance_sampling_mode", "sequence_mask", "learner.importance_sampling_mode"),
    here("vllm_importance_sampling_clip_max", 3.0, "learner.importance_sampling_max"),
    here("vllm_importance_sampling_clip_min", None, "learner.importance_sampling_min"),
    here("vllm_importance_sampling_cap", None, "learner.importance_sampling_max"),
    here("off_policy_mask_threshold", None, "learner.off_policy_threshold"),
    here("use_bias_correction_kl", True, "learner.use_bias_correction_kl"),
    # logging
    nothing("log_completions", False, "every completion is kept in trajectories/"),
    nothing("log_multimodal", True, _IMAGES),
    nothing("num_completions_to_print", None, "every completion is kept in trajectories/; agentrl view shows them"),
    nothing("log_unique_prompts", False, "every completion is kept in trajectories/, by its task"),
    absent("log_completions_hub_repo", None, _HUB),
    nothing("use_transformers_continuous_batching", False, _EMBEDDED),
    nothing("transformers_continuous_batching_config", None, _EMBEDDED),
    nothing("use_transformers_paged", False, _EMBEDDED),
)

TRAINER_ARGUMENTS: tuple[ForeignName, ...] = (
    here("reward_funcs", None, "env.rewards", "functions, or names: file.py:function", convert_rewards),
    here("train_dataset", None, "env.data"),
    here("eval_dataset", None, "env.test_data"),
    absent("args", None, "give its fields as settings: train(..., num_generations=8)"),
    absent("processing_class", None, "train(..., tokenizer=...) takes a loaded model's tokenizer"),
    absent("reward_processing_classes", None, "a reward model's tokenizer is loaded by its name"),
    joint("peft_config", None, "lora.rank", "its r, lora_alpha and target_modules"),
    joint("quantization_config", None, "lora.quantize", "load_in_4bit is 4bit"),
    absent("rollout_func", None, f"{_OWN_ENV}; the rollout itself is agentrl's, and keeps every token's logprob"),
    absent("environment_factory", None, f"{_OWN_ENV}; its methods become tools by @tool"),
)

_IN_THEM = "every completion is kept in trajectories/"
OLDER_FIELDS: tuple[ForeignName, ...] = (  # of earlier releases
    here("warmup_ratio", 0.0, "learner.warmup_ratio"),
    nothing("max_prompt_length", 512, "a prompt may have any length that the model has positions for"),
    absent("evaluation_strategy", "no", "its name is eval_strategy, and eval.every here"),
    nothing("logging_dir", None, "trackers write into the run folder"),
    nothing("overwrite_output_dir", False, "a folder that holds a run is refused; --resume continues it"),
    nothing("group_by_length", False, "batches are packed by tokens"),
    nothing("save_safetensors", True, "models are saved as safetensors"),
    nothing("wandb_log_unique_prompts", False, _IN_THEM),
    nothing("vllm_device", "auto", "vLLM is on the learner's GPU, or on those of agentrl serve"),
    nothing("vllm_dtype", "auto", "vLLM has the learner's dtype"),
    absent("vllm_guided_decoding_regex", None, "its name is vllm_structured_outputs_regex"),
    absent("no_cuda", False, "a GPU is used where there is one; CUDA_VISIBLE_DEVICES= hides it"),
)

SCRIPT_ARGUMENTS: tuple[ForeignName, ...] = (
    here("model_name_or_path", None, "model"),
    here("model_revision", "main", "load.revision", "main is the newest", convert_revision),
    here("torch_dtype", None, "dtype", "of the weights", convert_dtype),
    here("attn_implementation", None, "load.attn_implementation"),
    absent("gguf_file", None, "the file itself is the model: a path, or OWNER/REPOSITORY/FILE.gguf on the hub"),
    nothing("device_map", None, "a policy is on the GPU if there is one"),
    joint("use_peft", False, "lora.rank"),
    joint("lora_r", 16, "lora.rank"),
    joint("lora_alpha", 32, "lora.alpha"),
    absent("lora_dropout", 0.0, "adapters have no dropout: sampling and learning are the same function"),
    ForeignName("lora_target_modules", "setting", None, "lora.targets", "", convert_targets),
    absent("lora_target_parameters", None, "adapters are of linear layers: lora.targets"),
    absent("lora_modules_to_save", None, "beside an adapter nothing is trained"),
    nothing("lora_task_type", "CAUSAL_LM", "a policy is a causal LM"),
    absent("use_rslora", False, "an adapter counts lora.alpha / lora.rank; set alpha for another scale"),
    absent("use_dora", False, "adapters are plain low-rank ones"),
    absent("load_in_8bit", False, "weights beside an adapter are whole, or in 4 bits: lora.quantize = 4bit"),
    joint("load_in_4bit", False, "lora.quantize", "true is 4bit"),
    absent("bnb_4bit_quant_type", "nf4", "4 bits are NF4 here"),
    nothing("bnb_4bit_compute_dtype", None, "computed in dtype"),
    nothing("use_bnb_nested_quant", False, "how 4 bits are stored is set"),
    nothing("bnb_4bit_quant_storage", None, "how 4 bits are stored is set"),
    joint("dataset_name", None, "env.data"),
    joint("dataset_config", None, "env.data", "after the dataset's name, with a colon"),
    here("dataset_train_split", "train", "env.split"),
    here("dataset_test_split", "test", "env.test_split"),
    here("dataset_streaming", False, "env.streaming"),
    nothing("ignore_bias_buffers", False, "gradients are summed without torch's DDP"),
    absent("reward_model_name_or_path", None, "a reward model is a reward: env.rewards = reward-model:NAME"),
)
