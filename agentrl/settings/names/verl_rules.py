"""verl's names that make a setting together."""

from __future__ import annotations

from agentrl.errors import ConfigError
from agentrl.settings.names.values import JointRule, Settings, Values

_ACTOR = "actor_rollout_ref.actor"
_LOW, _HIGH, _BOTH = f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high", f"{_ACTOR}.clip_ratio"
_DATA, _RESPONSE = "data.max_response_length", "actor_rollout_ref.rollout.response_length"
_TRAINED, _MINI = "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"


def _clip(v: Values) -> Settings:
    ends = {"learner.epsilon": _LOW, "learner.epsilon_high": _HIGH}
    return {
        setting: v[_BOTH] if v[name] is None else v[name]
        for setting, name in ends.items()
        if v.explicit & {name, _BOTH}
    }


def _kl(v: Values) -> Settings:
    asked = v[f"{_ACTOR}.use_kl_loss"]
    return {"learner.beta": 0.0 if asked is False else v[f"{_ACTOR}.kl_loss_coef"]}


def _advantage(v: Values) -> Settings:
    name = v["algorithm.adv_estimator"]
    if "algorithm.adv_estimator" in v.explicit and name not in ("grpo", "rloo"):
        raise ConfigError(f"algorithm.adv_estimator: no critic is trained; grpo or rloo, not {name!r}")
    if name == "rloo":
        return {"learner.advantage": "rloo"}
    return {"learner.advantage": "grpo" if v["algorithm.norm_adv_by_std_in_grpo"] else "dr_grpo"}


def _batch(v: Values) -> Settings:
    trained = v.whole(_TRAINED)
    if v[_MINI] is None or _TRAINED not in v.explicit:
        return {"rollout.tasks_per_step": trained if _TRAINED in v.explicit else v.whole(_MINI)}
    mini = v.whole(_MINI)
    if trained % mini:
        raise ConfigError(f"{_MINI}: {mini} prompts at a time do not make up the {trained} of data.train_batch_size")
    settings: Settings = {"rollout.tasks_per_step": trained}
    return settings | ({"learner.steps_per_generation": trained // mini} if mini < trained else {})


def _length(v: Values) -> Settings:
    """Return the limits of an episode and of a turn: verl's response is all behind the prompt, of all turns."""
    tokens = v.whole(_DATA if v[_RESPONSE] is None else _RESPONSE)
    return {"rollout.max_tokens": tokens, "rollout.max_episode_tokens": tokens}


VERL_RULES: tuple[JointRule, ...] = (
    JointRule((_BOTH, _LOW, _HIGH), _clip),
    JointRule((f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"), _kl),
    JointRule(("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"), _advantage),
    JointRule((_TRAINED, _MINI), _batch),
    JointRule((_DATA, _RESPONSE), _length),
)
