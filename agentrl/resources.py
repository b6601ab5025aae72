"""The resources of a run: the policy, its renderer, the engine that samples from it, the environment's shared part."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl.engines.factories import prefers_vllm
from agentrl.engines.vllm import launch
from agentrl.environments.agent_env import AgentEnv
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, ContractError, UserError
from agentrl.gateway.gateway import Gateway
from agentrl.gateway.open_gateway import AgentPlan, let_agents_play, open_gateway, plan_agent
from agentrl.models import lora, policy
from agentrl.models.call_formats import build_call_format
from agentrl.models.lm_head import cast_head_to_fp32, unwrap_model
from agentrl.models.policy import Policy
from agentrl.players.controller import Controller
from agentrl.players.leased_rollout import LeasedRollout
from agentrl.players.open_players import build_recipe, open_players
from agentrl.players.recipe import Recipe
from agentrl.renderer.chat_template import list_templates, set_defaults
from agentrl.renderer.structured_outputs import OutputGrammar
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.engine_protocol import GrammarTaker, OpenEngine, returns_routed_experts
from agentrl.rollout.rollout import Rollout, check_deadlines
from agentrl.rollout.sub_agents import check_own_context
from agentrl.runtime.memory import collect_garbage_seldom, keep_freed_memory
from agentrl.settings.catalogue import bind_choices
from agentrl.settings.schema import EngineConfig, TrainConfig
from agentrl.tools.spawn import is_spawn

_ENGINE_NEEDS = (
    *("capacity", "max_context", "generate", "end_session", "update_weights", "close"),
    *("version", "meter", "__aenter__", "__aexit__"),
)
_ELSEWHERE = ("server", "launched")  # engines that are lent the weights


@dataclass(frozen=True)
class TrainingResources:
    """All that rollouts need, loaded and started."""

    config: TrainConfig
    spec: EnvSpec
    policy: Policy
    renderer: TemplateRenderer
    engine: OpenEngine
    grammar: OutputGrammar | None = None  # of every turn
    gateway: Gateway | None = None  # where an agent plays
    controller: Controller | None = None  # of players, where they roll out

    def rollout(self, split: str, spec: EnvSpec | None = None) -> Rollout:
        """Build a rollout over the tasks of a split, of the run's environment or of another one."""
        kind = Rollout if self.controller is None else LeasedRollout
        rollout = kind.from_config(self.config.rollout, spec or self.spec, self.engine, self.renderer, split)
        if isinstance(rollout, LeasedRollout):
            rollout.controller, rollout.context = self.controller, self.config.rollout.context
        rollout.sampling = replace(rollout.sampling, grammar=self.grammar)
        if split == "train" and returns_routed_experts(self.engine):
            rollout.sampling = replace(rollout.sampling, routed_experts_start=0)
        let_agents_play(rollout, self.gateway)
        return rollout


@dataclass(frozen=True)
class Sampler:
    """A policy, loaded, with its renderer, and the engine that samples from it, which is not started yet."""

    config: TrainConfig
    policy: Policy
    renderer: TemplateRenderer
    engine: OpenEngine
    grammar: OutputGrammar | None = None  # of every turn


def build_sampler(config: TrainConfig, loaded: Policy | None = None, *, learns: bool = False) -> Sampler:
    """Load the policy that the config names, and build its engine.

    Args:
        learns: the policy is trained meanwhile, so that an engine on the same GPU leaves room for that.

    Raises:
        UserError: something cannot be loaded.
    """
    keep_freed_memory()
    loaded = load_trainable_policy(config, loaded)
    config = _choose_engine(config, loaded.model)
    template = policy.find_template(loaded.tokenizer, config.chat_template)
    calls = build_call_format(config.call_format)
    words = config.template_words
    renderer = TemplateRenderer(loaded.tokenizer, template, loaded.end_tokens, calls, words, config.history)
    rules = config.rollout.structured_outputs
    grammar = OutputGrammar(loaded.tokenizer, renderer.get_stop_token_ids(), rules) if rules else None
    engine = _build_engine(config if learns else leave_out_learner(config), loaded.model)
    if grammar is not None and not (isinstance(engine, GrammarTaker) and engine.takes_grammars):
        raise ConfigError(
            f"rollout.structured_outputs: engine {config.engine.name} samples by no grammar; take --engine "
            "transformers, server or launched"
        )
    if learns and config.learner.router_replay and not returns_routed_experts(engine):
        raise ConfigError(
            f"learner.router_replay: engine {config.engine.name} does not say which experts its routers chose; take "
            "--engine transformers, vllm, server or launched, or leave it out"
        )
    return Sampler(config, loaded, renderer, engine, grammar)


@asynccontextmanager
async def open_resources(
    config: TrainConfig, spec: EnvSpec, loaded: Policy | None = None, *, learns: bool = False
) -> AsyncIterator[TrainingResources]:
    """Load and start what the config names; close it when the block ends.

    Args:
        learns: the policy is trained meanwhile.

    Raises:
        UserError: something cannot be loaded or started.
    """
    _check_player(config, spec)
    sampler = build_sampler(config, loaded, learns=learns)
    config = sampler.config
    async with spec.open(), sampler.engine as engine:
        check_deadlines(spec, config.rollout.turn_timeout_s)
        if any(map(is_spawn, spec.tool_list())):
            _check_spawn(config)
        agent = plan_agent(config, spec)
        with collect_garbage_seldom():
            async with (
                open_gateway(None if config.players.are_used else agent) as gateway,
                _open_players(sampler, agent) as controller,
            ):
                yield TrainingResources(
                    config, spec, sampler.policy, sampler.renderer, engine, sampler.grammar, gateway, controller
                )


@asynccontextmanager
async def _open_players(sampler: Sampler, agent: AgentPlan | None) -> AsyncIterator[Controller | None]:
    """Open the controller of players; None where episodes are rolled out in this process."""
    if not sampler.config.players.are_used:
        yield None
        return
    async with open_players(sampler.config, _build_recipe(sampler, agent), sampler.engine) as controller:
        yield controller


def _build_recipe(sampler: Sampler, agent: AgentPlan | None) -> Recipe:
    """Build what players are told of a sampler."""
    own = sampler.policy
    return build_recipe(
        sampler.config,
        sampler.engine,
        sampler.renderer,
        sampler.grammar,
        tokenizer=own.tokenizer,
        template=policy.find_template(own.tokenizer, sampler.config.chat_template),
        end_tokens=own.end_tokens,
        agent=agent,
    )


def _check_spawn(config: TrainConfig) -> None:
    """Refuse the tool ``spawn`` beside settings that it cannot go with, by a ConfigError."""
    if config.agent is not None:
        raise ConfigError(
            "the tool spawn and --agent do not go together: an agent opens conversations of its own, which are "
            "threads of the episode"
        )
    check_own_context(
        folds=config.rollout.context != "whole",
        branches=config.rollout.branches > 1,
        rewrites=config.history == "as_template",
    )


def _check_player(config: TrainConfig, spec: EnvSpec) -> None:
    """Refuse an environment of agents without one, and one that plays itself beside settings that it has not.

    Raises:
        ConfigError: and says which.
    """
    if not issubclass(spec.cls, AgentEnv):
        return
    what = f"env {spec.name!r} plays its episodes itself"
    if not spec.brings_agent:
        if config.agent is None:
            raise ConfigError(
                f"env {spec.name!r} is played by an agent, and there is none: --agent FILE.py:FUNCTION, a command, or "
                "the URL of a service"
            )
    elif config.agent is not None:
        raise ConfigError(f"{what}: leave out agent")
    elif config.rollout.branches > 1:
        raise ConfigError(f"{what}, and another's program cannot be cloned: leave out rollout.branches")
    elif config.rollout.context != "whole":
        raise ConfigError(f"{what}, in contexts of its own: leave out rollout.context {config.rollout.context}")


def load_trainable_policy(config: TrainConfig, loaded: Policy | None = None, *, follows: bool = False) -> Policy:
    """Load the policy that the config names, if none is given, and add the adapter that the config wants.

    One that will be cut into shards, and sampled from elsewhere, is not on a GPU as a whole.

    Args:
        follows: it is in one of the learner's further processes, which the first one sends the weights as they are cut.
    """
    if loaded is None:
        cut = int(os.environ.get("WORLD_SIZE", "1")) > 1 and config.learner.sharding != "none"
        loaded = policy.load_policy(
            *(config.model, config.dtype, config.lora.quantize, config.load),
            device="cpu" if cut and (follows or config.engine.name in _ELSEWHERE) else None,
            skeleton=cut and follows,
        )
    if config.learner.cast_lm_head_to_fp32:
        cast_head_to_fp32(unwrap_model(loaded.model))
    template: Any = policy.find_template(loaded.tokenizer, config.chat_template) or loaded.tokenizer.chat_template
    if config.chat_template in list_templates(loaded.tokenizer):  # its name stays one
        template = {"default": template, config.chat_template: template}
    words = config.template_words
    if template and (config.chat_template or words):  # who loads the model later renders as it was trained
        loaded = replace(loaded, chat_template=set_defaults(template, words))
    if config.lora.rank is not None:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            loaded = replace(
                loaded, model=lora.add_adapter(loaded.model, config.lora, config.model, config.load.revision)
            )
    if config.lora.quantize and not lora.has_adapter(loaded.model):
        raise UserError("lora.quantize: weights in 4 bits are not trained themselves; give lora.rank too")
    return loaded


def _choose_engine(config: TrainConfig, model: PreTrainedModel) -> TrainConfig:
    """Replace "auto" by an engine's name."""
    if config.engine.name != "auto":
        return config
    name = "vllm" if prefers_vllm(model, config) else "transformers"
    return config.model_copy(update={"engine": config.engine.model_copy(update={"name": name})})


def check_engine_processes(e: EngineConfig, *, deterministic: bool = False) -> None:
    """Refuse vLLM in this process beside further processes of the learner, on GPUs.

    vLLM's sender of weights gathers over all processes, while the others wait for rows: a deadlock.

    Raises:
        UserError: vLLM is named, or chosen by ``auto``, and torchrun has started several processes.
        SystemExit: the same, in the processes after the first one: that one prints the sentence.
    """
    world, rank = (int(os.environ.get(name, fresh)) for name, fresh in (("WORLD_SIZE", "1"), ("RANK", "0")))
    automatic = e.name == "auto" and launch.is_installed() and not deterministic
    if world == 1 or not torch.cuda.is_available() or not (automatic or e.name == "vllm"):
        return
    if rank:
        raise SystemExit(2)
    raise UserError(
        f"engine.name {e.name!r} is vLLM in the first process here, whose weight updates do not go together with the "
        f"{world} processes that torchrun started; sample from servers (agentrl serve MODEL, then --engine.name server "
        "--engine.urls http://HOST:PORT), or with --engine.name transformers"
    )


def leave_out_learner(config: TrainConfig) -> TrainConfig:
    """Return the config of a run that learns nothing: beside its engine there are the weights alone."""
    learner = config.learner.model_copy(update={"beta": 0.0, "optimizer_offload": True, "router_replay": False})
    rollout = config.rollout.model_copy(update={"max_staleness": 0})
    return config.model_copy(update={"learner": learner, "rollout": rollout})


def _build_engine(config: TrainConfig, model: PreTrainedModel) -> OpenEngine:
    """Build the engine named in the config, not yet started. Raises ContractError if it is none."""
    bound = bind_choices("engine", config.engine)["engine"]
    engine: OpenEngine = bound.call_safely(model, config)
    if missing := [name for name in _ENGINE_NEEDS if not hasattr(engine, name)]:
        raise ContractError(f"{bound.what} returned {engine!r:.80}, which is no OpenEngine: it has no {missing[0]}")
    return engine
