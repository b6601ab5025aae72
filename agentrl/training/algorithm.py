"""The algorithm that the settings name: the learner with its loss, the advantages, the order of tasks."""

from __future__ import annotations

import sys
import warnings
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from agentrl.credit import AdvantageRule
from agentrl.environments.curriculum import Curriculum, CurriculumSampler
from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import GuardedSampler, TaskSampler
from agentrl.errors import ConfigError, ContractError
from agentrl.learner.advantages.rule import apply_advantage
from agentrl.learner.bf16_products import has_bf16_products
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.losses.objective import Objective
from agentrl.learner.optimizers import Optimizers, OptimizerSource, adopt_optimizer, build_optimizers
from agentrl.learner.sharding import choose_shape
from agentrl.models.policy import Policy
from agentrl.rollout.engine_protocol import KeptTokensReporter
from agentrl.settings.catalogue import bind_choices, find_entries
from agentrl.settings.learner import LearnerConfig
from agentrl.settings.registry import is_own
from agentrl.settings.schema import TrainConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

LONG = 1000  # tokens a row may have, from which on the product of its ratios says little
# settings that leave tokens out, and their value for none
_TRUNCATING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "structured_outputs": {}}
_BY_ENTRIES = ("loss", "loss_args", "importance_sampling_mode", "importance_sampling_args")
OBJECTIVE = tuple(  # settings of the learner that say what is minimised, beside the entries and their parameters
    f.name for f in fields(Objective) if f.name not in _BY_ENTRIES and not find_entries("learner", f.name)
)


def build_learner(
    config: TrainConfig,
    spec: EnvSpec,
    policy: Policy,
    process_group: ProcessGroup,
    optimizer: OptimizerSource | None = None,
    *,
    keeps_whole: bool = True,
) -> Learner:
    """Make the learner with the objective that the settings name, and their optimizer or the one given.

    Args:
        keeps_whole: the first process has the policy beside its shards, for an engine there.
    """
    c, model = config.learner, policy.model
    in_shards = choose_shape(c.sharding, process_group.world_size, process_group.local_size) is not None
    _check_offload(c, on_cpu=model.device.type == "cpu" and not torch.cuda.is_available(), in_shards=in_shards)
    bound = bind_choices("learner", c)["optimizer"]

    def build(trained: PreTrainedModel | PeftModel) -> Optimizers:
        return build_optimizers(trained, bound, c.lr) if optimizer is None else adopt_optimizer(trained, optimizer)

    if in_shards:
        _check_shards(config, optimizer)
    betas = [c.beta, *(float(stage.learner.get("beta", 0.0)) for stage in config.stages)]
    settings = replace(build_loss_settings(config, spec), beta=max(betas))  # the reference is kept from the beginning
    return Learner(model, build, settings, process_group, c.sharding, keeps_whole)


def _check_offload(c: LearnerConfig, *, on_cpu: bool, in_shards: bool) -> None:
    """Refuse to keep on the CPU what is there, and what nothing moves."""
    if c.optimizer_offload and on_cpu:
        raise ConfigError("learner.optimizer_offload: the policy is on the CPU, and so is its optimizer; leave it out")
    if c.param_offload and on_cpu:
        raise ConfigError("learner.param_offload: the policy is on the CPU already; leave it out")
    if c.optimizer_offload and in_shards:
        raise ConfigError(
            "learner.optimizer_offload is of one process that shares its GPU with vLLM; of a policy in shards, "
            "learner.param_offload keeps the optimizer on the CPU, and the shards too"
        )
    if c.param_offload and not in_shards:
        raise ConfigError(
            "learner.param_offload is of a policy in shards: several processes (torchrun), and learner.sharding full "
            "or hybrid; for one process there are learner.optimizer_offload and lora.rank"
        )


def _check_shards(config: TrainConfig, optimizer: OptimizerSource | None) -> None:
    """Refuse optimizers that know nothing of shards."""
    why = ""
    if isinstance(optimizer, torch.optim.Optimizer):
        why = f"this {type(optimizer).__name__} was made of whole parameters; pass a function of the parameters to it"
    elif optimizer is None and config.learner.optimizer == "adamw_8bit":
        why = "bitsandbytes steps whole parameters; take learner.optimizer adamw"
    if why:
        raise ConfigError(f"learner.sharding {config.learner.sharding}: {why}, or learner.sharding none")


def build_loss_settings(config: TrainConfig, spec: EnvSpec) -> LossSettings:
    """Build the objective that the settings name, and how it is computed."""
    c = config.learner
    entries = bind_choices("learner", c)
    turns = config.rollout.max_turns or spec.sample().max_turns
    longest = min(turns * config.rollout.max_tokens, config.rollout.max_episode_tokens or sys.maxsize)
    if c.importance_sampling_mode == "sequence_mask" and longest > LONG:
        warnings.warn(
            "learner.importance_sampling_mode sequence_mask leaves out whole rows, and ever more of them the longer "
            f"they are (here up to {longest:,} tokens): at a mismatch of 0.02 nats a token a tenth of those of 2,000; "
            "geometric_mask goes by the mean",
            stacklevel=2,
        )
    return LossSettings(
        loss=c.loss,
        loss_args=entries["loss"].parameters,
        importance_sampling_mode=c.importance_sampling_mode,
        importance_sampling_args=entries["importance_sampling"].parameters,
        **{name: getattr(c, name) for name in OBJECTIVE},
        temperature=config.rollout.temperature,
        repetition_penalty=config.rollout.repetition_penalty,
        max_grad_norm=c.max_grad_norm,
        num_iterations=c.num_iterations,
        packing=c.packing,
        max_tokens_per_microbatch=c.max_tokens_per_microbatch,
        threads=c.threads,
        longest=longest,
        ref_sync_steps=c.ref_sync_steps,
        ref_mixup_alpha=c.ref_mixup_alpha,
        gradient_checkpointing=c.gradient_checkpointing,
        optimizer_offload=c.optimizer_offload,
        param_offload=c.param_offload,
        bf16=c.bf16,
        router_aux_loss_coef=c.router_aux_loss_coef,
        router_replay=c.router_replay,
    )


def explain_truncation(config: TrainConfig, engine: object) -> str | None:
    """Say how the learner's distribution differs from the one sampled from; None where it is the same.

    Raises:
        ConfigError: it differs, and nothing corrects for it.
    """
    r, mode = config.rollout, config.learner.importance_sampling_mode
    names = [f"rollout.{n}" for n, all_kept in _TRUNCATING.items() if getattr(r, n) != all_kept]
    if not names or (isinstance(engine, KeptTokensReporter) and engine.reports_kept):
        return None
    what = f"{' and '.join(names)}: this engine does not say which tokens it left out"
    if mode == "none":
        raise ConfigError(
            f"{what}, and learner.importance_sampling_mode none corrects for nothing; take another mode, or "
            "--engine transformers"
        )
    return f"{what}; the learner's distribution is over all tokens, and importance sampling ({mode}) corrects for it"


def explain_bf16(config: TrainConfig, policy: Policy) -> str | None:
    """Say which settings of bfloat16 make nothing faster here; None where they do, or are off."""
    wanted = {"learner.bf16": config.learner.bf16, "engine.dtype": config.engine.dtype == "bfloat16"}
    names = [name for name, is_on in wanted.items() if is_on]
    if not names or has_bf16_products(policy.model.device):
        return None
    return f"{' and '.join(names)}: this machine has no products in bfloat16, and is no faster by them"


def choose_advantage(c: LearnerConfig) -> AdvantageRule:
    """Return the advantage function that the settings name, with its parameters bound, and its results checked."""
    return partial(apply_advantage, bind_choices("learner", c)["advantage"])


def build_task_sampler(config: TrainConfig, count: int | None, curriculum: Curriculum | None) -> TaskSampler:
    """Make the sampler that the settings name; ``count``: the tasks there are, None for any number.

    Raises:
        ContractError: the settings name what makes no sampler.
    """
    if curriculum is not None:
        return CurriculumSampler(count, config.seed, curriculum=curriculum)
    bound = bind_choices("rollout", config.rollout)["sampler"]
    sampler = bound.call_safely(count, config.seed)
    if not isinstance(sampler, TaskSampler):
        raise ContractError(f"{bound.what} returns a subclass of TaskSampler, not {sampler!r:.80}")
    return sampler if is_own("sampler", bound.name) else GuardedSampler(count, config.seed, sampler=sampler)
