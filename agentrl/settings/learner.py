"""The settings of the learner, and of the adapter that it may train."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from agentrl.settings.catalogue import check_entries, shared
from agentrl.settings.section import Section
from agentrl.settings.values import (
    LISTED,
    AdvantageName,
    CommaSeparated,
    ImportanceSamplingName,
    LossName,
    OptimizerName,
    Parameters,
)
from agentrl.types import Stop

Sharding = Literal["full", "hybrid", "none"]
LRSchedulerName = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


class LearnerConfig(Section):
    """The update of the policy."""

    optimizer: OptimizerName = Field(
        "adamw",
        description="adamw_8bit keeps its state in 8 bits (bitsandbytes); muon: docs/algorithms.md; or module:function",
    )
    optimizer_args: Parameters = Field(
        {}, description="parameters of an optimizer: --learner.optimizer_args.NAME VALUE"
    )
    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    lr_scheduler: LRSchedulerName = Field("constant", description="of the rate, by the names of transformers")
    lr_scheduler_args: Parameters = Field(
        {}, description="its own settings: --learner.lr_scheduler_args.min_lr_rate 0.1 of cosine_with_min_lr"
    )
    warmup_steps: int = Field(0, ge=0, description="steps in which the rate rises to its peak; the first one has 0")
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="the same as a share of all steps")
    weight_decay: float | None = shared("of the weights, a step")
    betas: Annotated[tuple[float, float], LISTED] | None = shared("of AdamW's two running means")
    adam_epsilon: float | None = shared("added to the denominator of AdamW's step")
    loss: LossName = Field("dapo", description="agentrl list losses has them all; or module:function")
    loss_args: Parameters = Field({}, description="parameters of a loss: --learner.loss_args.NAME VALUE")
    advantage: AdvantageName = Field(
        "grpo", description="of an episode in its group, or of its turns: agentrl list advantages; or module:function"
    )
    advantage_args: Parameters = Field({}, description="parameters of it: --learner.advantage_args.NAME VALUE")
    gamma: float | None = shared("what a later turn's reward counts in a turn's return")
    step_weight: float | None = shared("of the turn's part in the advantage")
    importance_level: Literal["token", "sequence"] = Field("token", description="whose ratio; sequence: GSPO")
    num_iterations: int = Field(1, ge=1, description="passes over one batch, each an optimizer step or several")
    steps_per_generation: int = Field(
        1, ge=1, description="optimizer steps that a batch is cut into, its episodes in random order"
    )
    epsilon: float | None = shared("lower clip of the ratio; from a batch's second update on")
    epsilon_high: float | None = shared("upper clip of the ratio; cispo's cap, 5.0 by default there")
    delta: float | None = shared("cap of the ratio where the advantage is negative")
    beta: float = Field(0.0, ge=0, description="of the KL term to the reference, the policy as the run began")
    use_bias_correction_kl: bool = Field(True, description="multiply the KL term by the ratio, as TRL does")
    ref_sync_steps: int | None = Field(None, ge=1, description="updates after which the reference follows the policy")
    ref_mixup_alpha: float = Field(
        1.0, gt=0, le=1, description="the policy's share of the reference then; 1: the reference is the policy"
    )
    importance_sampling_mode: ImportanceSamplingName = Field(
        "token_truncate",
        description="of p_learner / p_engine outside its bounds: agentrl list importance_sampling; or module:function",
    )
    importance_sampling_args: Parameters = Field(
        {}, description="parameters of it: --learner.importance_sampling_args.NAME VALUE"
    )
    importance_sampling_min: float | None = shared("its lower bound; none: no bound")
    importance_sampling_max: float | None = shared("its upper bound; none: no bound")
    off_policy_threshold: float | None = Field(
        None, description="rows to be punished whose mean(sampled - learner's logprob) is above it are left out"
    )
    top_entropy_quantile: float = Field(1.0, gt=0, le=1, description="share of the tokens trained, the least sure ones")
    entropy_coef: float = Field(0.0, description="of the entropy bonus")
    max_grad_norm: float = Field(1.0, gt=0)
    packing: Literal["prefix", "padded"] = Field(
        "prefix", description="prefix: what rows begin with alike is computed once, where the model allows it"
    )
    max_tokens_per_microbatch: int | None = Field(
        None, ge=1, description="tokens in one forward and backward pass; by default what the memory has room for"
    )
    mask_stop_reasons: Annotated[tuple[Stop, ...], LISTED] = Field(
        (), description="episodes that stopped so are not trained, such as max_tokens"
    )
    router_aux_loss_coef: float | None = Field(
        None, ge=0, description="of the balancing loss of a mixture of experts; the model's own by default, 0: none"
    )
    router_replay: bool = Field(
        False,
        description="tokens of a mixture of experts go to the experts that the engine's routers chose (R3), where it "
        "says them",
    )
    cast_lm_head_to_fp32: bool = Field(False, description="compute logits in float32, of weights in fewer bits too")
    bf16: bool = Field(False, description="multiply in bfloat16 while learning; weights and the rest stay in float32")
    gradient_checkpointing: bool = Field(False, description="less memory, a third more time: layers compute again")
    sharding: Sharding = Field(
        "full",
        description="what several processes (torchrun) hold of the policy: full: a part each, hybrid: a part each of "
        "those on a machine, none: all of it",
    )
    rank_timeout_s: float = Field(
        300.0, gt=0, description="seconds without a sign of life of one of several processes, until the others end"
    )
    optimizer_offload: bool = Field(
        False, description="what the optimizer holds is on the CPU while the engine samples; on one GPU with vLLM"
    )
    param_offload: bool = Field(
        False, description="shards, and what the optimizer holds of them, are on the CPU, and are stepped there"
    )
    threads: int | None = Field(None, ge=1, description="torch threads while learning; all cores by default")

    @pydantic.model_validator(mode="after")
    def _check_loss(self) -> LearnerConfig:
        """Reject settings that the chosen entries ignore."""
        check_entries("learner", self)
        if not self.beta and (not self.use_bias_correction_kl or self.ref_sync_steps):
            raise ValueError("use_bias_correction_kl and ref_sync_steps are of the KL term, which beta = 0 leaves out")
        if self.ref_mixup_alpha != 1.0 and not self.ref_sync_steps:
            raise ValueError(f"ref_mixup_alpha {self.ref_mixup_alpha:g} is of the updates that ref_sync_steps names")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and warmup_ratio {self.warmup_ratio} say the same twice"
            )
        return self


class LoraConfig(Section):
    """An adapter that is trained instead of the model."""

    rank: int | None = Field(None, ge=1, description="of the adapter's matrices; without it the whole model is trained")
    alpha: float | None = Field(None, gt=0, description="the adapter counts alpha / rank; 2 x rank by default")
    quantize: Literal["4bit"] | None = Field(
        None, description="of the weights beside the adapter (QLoRA, bitsandbytes)"
    )
    targets: CommaSeparated = Field(("all-linear",), description="names of the layers; all-linear: all but the head")

    @pydantic.model_validator(mode="after")
    def _ranked(self) -> LoraConfig:
        if self.rank is None and (self.alpha is not None or self.targets != ("all-linear",)):
            raise ValueError("alpha and targets are of an adapter, which there is with lora.rank")
        return self
