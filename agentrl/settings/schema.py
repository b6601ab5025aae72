"""The settings of a run, with what each one means and what goes with what."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

from agentrl.settings.catalogue import check_entries, shared
from agentrl.settings.evaluation import EvalConfig
from agentrl.settings.learner import LearnerConfig, LoraConfig
from agentrl.settings.load import DType, LoadConfig
from agentrl.settings.players import PlayersConfig
from agentrl.settings.section import Section
from agentrl.settings.sft import SftConfig
from agentrl.settings.signature import is_plain
from agentrl.settings.template import HISTORY, History, TemplateSettings
from agentrl.settings.values import (
    CallFormatName,
    CommaSeparated,
    ContextName,
    EngineName,
    NamedObjects,
    Parameters,
    SamplerName,
    StructuredOutputs,
)


class EngineConfig(Section):
    """The engine that samples."""

    name: EngineName = Field(
        "auto",
        description="transformers: embedded; vllm: vLLM in process; server: vLLM servers at engine.urls; "
        "launched: vLLM servers that the run starts; "
        "auto: vllm on a GPU where it is installed, else transformers; or module:function",
    )
    args: Parameters = Field({}, description="parameters of an engine: --engine.args.NAME VALUE")
    max_num_seqs: int = Field(128, ge=1, description="rows sampled at the same time; of each server, as it was started")
    max_model_len: int | None = Field(
        None, ge=2, description="positions of an episode; the model's own limit by default"
    )
    threads: int | None = shared("threads while sampling; by the model's size by default")
    dtype: str | None = shared("of the embedded engine's products: auto, float32, bfloat16; auto: the weights'")
    urls: CommaSeparated | None = shared("vLLM servers, as agentrl serve prints them; commas between them")
    gpu_share: float | None = shared("of the GPU's memory, for vLLM beside the learner; by default what that leaves")
    update: str | None = shared("in-flight: requests continue with new weights; drain: they end first")
    weight_sync_timeout_s: float | None = shared(
        "of a stage of a weight transfer, beyond what the bytes take: 10 by default; then the server is lost"
    )

    weight_transfer: str | None = shared(
        "how weights go to servers: auto, memory, nccl, nccl_m2n; auto: as they were started for"
    )
    master_address: str | None = shared(
        "of this machine, where servers' GPUs meet it for weights; by default the route"
    )
    port_range: str | None = shared("of ports for that, such as 29600-29699; any free one by default")

    @pydantic.model_validator(mode="after")
    def _check_engine(self) -> EngineConfig:
        """Reject settings that the chosen engine ignores."""
        check_entries("engine", self)
        return self


class RolloutConfig(Section):
    """The rollout of episodes."""

    tasks_per_step: int = Field(16, ge=1, description="tasks of a step, each with group_size episodes")
    group_size: int = Field(8, ge=2, description="episodes of each task")
    min_group_size: int = Field(2, ge=2, description="a group with fewer samples left by faults is dropped")
    max_staleness: int = Field(
        0, ge=0, description="updates between a group's beginning and its being learned from; over 0 both overlap"
    )
    sampler: SamplerName = Field(
        "order", description="difficulty: tasks that are always or never solved come seldom; or module:function"
    )
    sampler_args: Parameters = Field({}, description="parameters of a sampler: --rollout.sampler_args.NAME VALUE")
    curriculum: str | None = Field(
        None, description="module:function, from the outcomes so far to the options of a reset"
    )
    dynamic_sampling: bool = Field(
        False, description="zero-variance groups (all rewards the same) are replaced by others, with other tasks"
    )
    max_resamples: int | None = Field(
        None,
        ge=0,
        description="replaced groups a step, lost or zero-variance ones; tasks_per_step by default",
    )
    oversample: int = Field(
        0, ge=0, description="episodes a group begins beyond its size; the last to end are cancelled"
    )
    branches: int = Field(1, ge=1, description="episodes that one becomes after branch_turn turns, by Env.clone")
    branch_turn: int = Field(1, ge=0, description="turns before an episode branches")
    stall_timeout_s: float | None = Field(
        None,
        gt=0,
        description="after that long without a turn or a token it is told who waits on what; by default after 60 s, "
        "and not while what is waited for is within its own deadline",
    )
    temperature: float = Field(1.0, gt=0, description="of sampling; the learner's logprobs are at the same one")
    top_p: float = Field(1.0, gt=0, le=1, description="the smallest set of tokens of that probability is sampled from")
    top_k: int = Field(0, ge=0, description="so many most probable tokens are sampled from; 0: all")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="tokens below that share of the most probable one's probability are left out"
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="of the tokens of the context, as in transformers; over 1 against repetition"
    )
    stop: CommaSeparated = Field(
        (), description="strings that end a turn, with commas between them; what is read ends before the string"
    )
    structured_outputs: StructuredOutputs = Field(
        {}, description="what each turn's text must match: regex, or json, a schema; as vLLM has it"
    )
    max_turns: int | None = Field(None, ge=1, description="turns of an episode; the environment's own by default")
    max_tokens: int = Field(512, ge=1, description="tokens the model may sample in a turn")
    max_episode_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of an episode behind its prompt, those of tools too",
    )
    context: ContextName = Field(
        "whole", description="fold: past context_budget the policy writes a summary and goes on; or module:function"
    )
    context_budget: int | None = Field(None, ge=1, description="tokens of a context past which it is folded")
    summary_tokens: int = Field(256, ge=1, description="tokens the model may sample in a summary of a folded context")
    turn_timeout_s: float = Field(120.0, gt=0, description="deadline of an environment's reset, step or score")
    episode_timeout_s: float = Field(600.0, gt=0, description="deadline of an episode")

    @pydantic.model_validator(mode="after")
    def _nested(self) -> RolloutConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is over group_size {self.group_size}: every group is dropped"
            )
        check_entries("rollout", self)
        if self.curriculum is not None and self.sampler != "order":
            raise ValueError(f"curriculum and sampler {self.sampler} do not go together")
        if self.group_size % self.branches:
            raise ValueError(f"group_size {self.group_size} is no multiple of branches {self.branches}")
        if self.oversample and self.branches > 1:
            raise ValueError("oversample and branches do not go together")
        self._check_context()
        if self.turn_timeout_s > self.episode_timeout_s:
            raise ValueError("turn_timeout_s is over episode_timeout_s; deadlines nest")
        if "" in self.stop:
            raise ValueError("stop: an empty string ends every turn at once")
        if self.top_k == 1:
            raise ValueError("top_k 1 leaves a single token: all samples of a group are alike, and nothing is learned")
        return self

    def _check_context(self) -> None:
        if self.context == "whole":
            if given := {"context_budget", "summary_tokens"} & self.model_fields_set - self._list_defaults():
                raise ValueError(f"{min(given)} is of contexts that are folded, and context is whole: context fold")
        elif self.context_budget is None:
            raise ValueError(f"context {self.context} needs context_budget: the tokens past which a context is folded")
        elif self.branches > 1:
            raise ValueError(f"context {self.context} and branches do not go together")

    def _list_defaults(self) -> set[str]:
        fields = type(self).model_fields
        return {name for name, one in fields.items() if getattr(self, name) == one.default}


IN_STAGES = {  # settings that a stage may have of its own
    "rollout": (
        *("tasks_per_step", "group_size", "dynamic_sampling", "max_resamples", "oversample", "temperature"),
        *("top_p", "top_k", "min_p", "repetition_penalty"),
        *("max_turns", "max_tokens", "max_episode_tokens", "turn_timeout_s", "episode_timeout_s"),
    ),
    "learner": (
        *("lr", "beta", "entropy_coef", "top_entropy_quantile", "mask_stop_reasons", "max_grad_norm"),
        "max_tokens_per_microbatch",
    ),
}


class _StageConfig(Section):
    """A stage of a run: so many of its steps, with settings of their own."""

    name: str | None = None
    steps: int = Field(ge=1)
    env: dict[str, Any] = Field({}, description="settings that differ from the run's; with a name, another environment")
    rollout: dict[str, Any] = Field({}, description=f"of its own: {', '.join(IN_STAGES['rollout'])}")
    learner: dict[str, Any] = Field({}, description=f"of its own: {', '.join(IN_STAGES['learner'])}")
    reset_optimizer: bool = Field(False, description="begin with an optimizer that remembers nothing")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_one_policy(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if "model" in given:
            raise ValueError("a stage has no model of its own: one policy goes through all stages")
        for section, names in IN_STAGES.items():
            own = given.get(section)
            for name in own if isinstance(own, dict) else ():
                if name not in names:
                    raise ValueError(f"{section}.{name} is of the whole run; a stage may set {', '.join(names)}")
        return {**given, "env": {"name": given["env"]}} if isinstance(given.get("env"), str) else given

    @pydantic.field_serializer("env", when_used="json")
    def _plain_env(self, env: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in env.items() if is_plain(value)}


class RunConfig(Section):
    """The run folder."""

    dir: str | None = Field(None, description="runs/DATE-TIME-ENV by default")
    resume: bool = Field(False, description="resume the run that the folder holds from its newest checkpoint")
    save_every: int = Field(10, ge=0, description="steps between checkpoints; 0: at the end alone")
    fallback_dir: str | None = Field(
        None, description="a folder on another disk, for checkpoints and the model where that of dir is full"
    )
    load_best: bool = Field(
        False, description="the model at the end is that of the best evaluation (eval.metric), not the last step's"
    )
    trackers: CommaSeparated = Field(
        (), description="wandb, tensorboard, trackio, mlflow ...; commas between them; none: no tracker"
    )
    callbacks: CommaSeparated = Field(
        (), description="callbacks by name: file.py:Class; commas between them (agentrl list callbacks)"
    )
    metrics: NamedObjects = Field(
        (), description="functions of a step's episodes that return numbers to log: file.py:function; docs/extend.md"
    )
    project: str = Field("agentrl", description="what the trackers call the place of many runs")

    @pydantic.field_validator("trackers")
    @classmethod
    def _unset(cls, trackers: tuple[str, ...]) -> tuple[str, ...]:
        return () if trackers == ("none",) else trackers  # as TRL's report_to: what a file names is unset

    @pydantic.model_validator(mode="after")
    def _placed(self) -> RunConfig:
        if not self.trackers and self.project != "agentrl":
            raise ValueError("project is for trackers, and there are none: run.trackers")
        if self.resume and self.dir is None:
            raise ValueError("resume needs dir, the run's folder")
        return self


class TrainConfig(Section):
    """Everything a run is made of. ``env`` holds the name and the environment's own settings."""

    env: dict[str, Any] = Field(description="name (or module:Class), and the environment's own settings")
    tools: NamedObjects = Field(
        (), description="more tools for the environment, by name, or file.py:function; commas between them"
    )
    tool: dict[str, dict[str, Any]] = Field({}, description="settings of tools: --tool.NAME.SETTING value")
    agent: str | None = Field(
        None,
        description="a program that plays the episodes: FILE.py:FUNCTION, a command such as 'python my_agent.py', or "
        "the URL of a service",
    )
    agent_workers: int = Field(2, ge=1, description="processes that an agent's function is called in")
    agent_sandbox: Literal["bubblewrap"] | None = Field(
        None,
        description="that an agent's command runs in: it reaches the policy, and reads programs and its own files",
    )
    agent_readable: CommaSeparated = Field(
        (), description="further folders that an agent in a sandbox reads; commas between them"
    )
    model: str = Field(
        "nano", description="a registered model, a folder, a run folder, a GGUF file, or a name on the model hub"
    )
    dtype: DType = Field("float32", description="of the weights; auto: the one that they are stored in")
    load: LoadConfig = LoadConfig()
    call_format: CallFormatName = Field(
        "auto",
        description="how the model writes tool calls: auto (as its chat template does), agentrl list call_formats, "
        "or file.py:Class",
    )
    chat_template: str | None = Field(
        None, description="a Jinja file to use instead of the model's own, or the name of one, where it has several"
    )
    template: TemplateSettings = Field(
        {},
        description="words that the chat template reads: --template.enable_thinking false; and history: as_sampled, or "
        "as_template, which drops earlier thoughts where the template does",
    )
    seed: int = Field(0, ge=0, lt=2**31)
    steps: int = Field(100, ge=1)
    epochs: float | None = Field(None, gt=0, description="passes over all training tasks, instead of steps")
    deterministic: bool = Field(
        False, description="the same bits each time, also where it is killed; many times slower"
    )
    stages: tuple[_StageConfig, ...] = Field(
        (), description="[[stages]] in a file: each with steps, env, ... of its own"
    )
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    players: PlayersConfig = PlayersConfig()
    learner: LearnerConfig = LearnerConfig()
    sft: SftConfig = SftConfig()
    lora: LoraConfig = LoraConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()

    @property
    def template_words(self) -> dict[str, Any]:
        """Return the words of ``template``, which the chat template is given."""
        return {word: value for word, value in self.template.items() if word != HISTORY}

    @property
    def history(self) -> History:
        """Return ``template.history``."""
        history: History = self.template.get(HISTORY, "as_sampled")
        return history

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sum_stages(cls, given: Any) -> Any:
        """Set the steps of a run of stages: all of theirs."""
        stages = given.get("stages") if isinstance(given, dict) else None
        steps = [s.get("steps") for s in stages if isinstance(s, dict)] if isinstance(stages, list | tuple) else []
        if "steps" in given or not steps or not all(isinstance(n, int) and n > 0 for n in steps):
            return given
        return {**given, "steps": sum(steps)}

    @pydantic.model_validator(mode="after")
    def _countable(self) -> TrainConfig:
        episodes = self.rollout.tasks_per_step * self.rollout.group_size
        if self.learner.steps_per_generation > episodes:
            raise ValueError(
                f"learner.steps_per_generation {self.learner.steps_per_generation} is over the {episodes} episodes of "
                "a step: rollout.tasks_per_step x rollout.group_size"
            )
        if self.learner.optimizer_offload and self.rollout.max_staleness:
            raise ValueError(
                "learner.optimizer_offload is of an engine that samples while the learner waits, and with "
                f"rollout.max_staleness {self.rollout.max_staleness} it does not wait: leave out one of them"
            )
        if self.stages and self.epochs is not None:
            raise ValueError("epochs and stages do not go together: each stage has steps of its own")
        if self.stages and (total := sum(s.steps for s in self.stages)) != self.steps:
            raise ValueError(f"steps {self.steps}: the stages have {total} together; change the steps of one of them")
        compared = {"metric", "min_delta", "greater_is_better"} & {
            n for n, f in EvalConfig.model_fields.items() if getattr(self.eval, n) != f.default
        }
        if self.run.load_best and not self.eval.every:
            raise ValueError("run.load_best is of the evaluations in mid-run, and eval.every 0 makes none")
        if self.run.load_best and self.epochs is None and self.eval.every > self.steps:
            raise ValueError(f"run.load_best: eval.every {self.eval.every} is over the {self.steps} steps")
        if compared and not self.run.load_best and (self.eval.patience is None):
            raise ValueError(f"eval.{min(compared)} is for eval.patience and run.load_best, and neither is set")
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"epochs {self.epochs:g} and steps {self.steps} say the same twice")
        if self.epochs is not None and (self.rollout.sampler != "order" or self.rollout.curriculum):
            how = "a curriculum" if self.rollout.curriculum else f"sampler {self.rollout.sampler}"
            raise ValueError(f"epochs are passes over all tasks in turn; {how} makes none: give steps")
        return self

    @pydantic.model_validator(mode="after")
    def _played(self) -> TrainConfig:
        if self.rollout.context != "whole" and self.agent is not None:
            raise ValueError(f"rollout.context {self.rollout.context} and agent do not go together: it has its own")
        if self.rollout.context != "whole" and self.history != "as_sampled":
            raise ValueError(
                f"rollout.context {self.rollout.context} and template.history {self.history} do not go together: each "
                "begins contexts anew"
            )
        if self.agent is None:
            if self.agent_workers != type(self).model_fields["agent_workers"].default:
                raise ValueError("agent_workers is of an agent, and there is none: agent")
            if self.agent_sandbox is not None or self.agent_readable:
                raise ValueError("agent_sandbox and agent_readable are of an agent, and there is none: agent")
            return self
        if self.agent_readable and self.agent_sandbox is None:
            raise ValueError("agent_readable is of a sandbox, and there is none: agent_sandbox bubblewrap")
        if self.rollout.branches > 1:
            raise ValueError("agent and rollout.branches do not go together: another's program cannot be cloned")
        if self.sft.data:
            raise ValueError("agent is of rollouts, and sft.data of demonstrations: two runs, one after the other")
        return self

    @pydantic.model_validator(mode="after")
    def _leased(self) -> TrainConfig:
        if self.players.are_used and self.sft.data:
            raise ValueError("players are of rollouts, and sft.data of demonstrations: leave one of them out")
        return self

    @pydantic.model_validator(mode="after")
    def _demonstrated(self) -> TrainConfig:
        imitates = self.learner.advantage == "demonstrated"
        if self.sft.data and not (imitates and self.learner.loss == "sft"):
            raise ValueError(
                "sft.data is learned from with learner.loss sft and learner.advantage demonstrated, which agentrl sft "
                f"sets, not with {self.learner.loss} and {self.learner.advantage}: leave those out, or sft.data"
            )
        if imitates and not self.sft.data:
            raise ValueError(
                "learner.advantage demonstrated is of demonstrations, and sft.data names none: agentrl sft"
            )
        if self.sft.data and self.learner.router_replay:
            raise ValueError(
                "learner.router_replay is of experts that an engine chose, and nobody sampled the demonstrations of "
                "sft.data: leave it out"
            )
        if self.sft.data and self.stages:
            raise ValueError("stages are of rollouts, and sft.data of demonstrations: two runs, one after the other")
        return self

    @pydantic.model_validator(mode="after")
    def _repeatable(self) -> TrainConfig:
        if self.deterministic and self.engine.name not in ("auto", "transformers"):
            raise ValueError(f"deterministic is for the embedded engine; engine {self.engine.name} mixes its batches")
        if self.deterministic and self.rollout.max_staleness:
            raise ValueError(
                "deterministic and rollout.max_staleness do not go together: what is how old is up to time"
            )
        if self.deterministic and self.rollout.oversample:
            raise ValueError(
                "deterministic and rollout.oversample do not go together: which episodes end last is up to time"
            )
        if self.deterministic and self.eval.mode == "overlap":
            raise ValueError("deterministic and eval.mode overlap do not go together: what is begun when is up to time")
        return self

    @pydantic.field_validator("env", mode="before")
    @classmethod
    def _with_name(cls, env: Any) -> Any:
        env = {"name": env} if isinstance(env, str) else env
        if not isinstance(env, dict) or not isinstance(env.get("name"), str):
            raise ValueError("env needs a name")
        return env
