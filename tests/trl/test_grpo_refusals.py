"""TRL's tests that have no counterpart: each is refused in a sentence; docs/from-trl.md lists them, with the reason."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from tests.helpers import pages
from tests.trl.trainer import of_family, train_trl

FAMILIES = ("gpt_oss", "nemotron_h")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # TRL's test: what it sets, and the reason
    "test_generate_prefers_rollout_func": ({"rollout_func": print}, "an environment is a class here"),
    "test_generate_rollout_func_syncs_vllm_weights_when_needed": ({"rollout_func": print}, "the rollout itself is"),
    "test_generate_rollout_func_raises_when_required_keys_are_missing": ({"rollout_func": print}, "keeps every token"),
    "test_liger_kernel_with_peft_lm_head_raises": ({"use_liger_kernel": True}, "learner.packing"),
    "test_train_with_off_policy_mask_with_liger": ({"use_liger_kernel": True}, "rows share what they begin with"),
    "test_train_with_adaptive_entropy": ({"use_adaptive_entropy": True}, "learner.entropy_coef is fixed"),
    "test_train_with_adaptive_entropy_gradient_accumulation": ({"use_adaptive_entropy": True}, "is fixed"),
    "test_train_with_generation_kwargs": ({"generation_kwargs": {"num_beams": 2}}, "there is no such setting here"),
    "test_train_with_chat_template_kwargs": (
        {"chat_template_kwargs": {"enable_thinkin": False}},
        "the chat template reads no such word",
    ),
    "test_mismatched_reward_processing_classes_length": ({"reward_processing_classes": [1]}, "is loaded by its name"),
    "test_environment_owned_data_requires_max_steps": ({"environment_factory": dict}, "an environment is a class"),
    "test_multiple_environments_without_dataset_raises": (
        {"environment_factory": {"a": dict}},
        "become tools by @tool",
    ),
    "test_train_with_unknown_environment_raises": ({"environment_factory": {"a": dict}}, "an environment is a class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_here_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    given, reason = REFUSED[name]
    with pytest.raises(UserError) as raised:
        train_trl(tmp_path, **given)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_the_embedded_engine_cannot_run_fast_is_trained_all_the_same(family: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train_trl(tmp_path, of_family(family)).rows
    plain = [str(w.message) for w in told if "the embedded engine goes the plain way" in str(w.message)]
    assert len(plain) == 1


def test_the_page_lists_them() -> None:
    rows = pages.rows(pages.ROOT / "docs/from-trl.md", "| TRL's test")
    assert [row[0].strip("`") for row in rows] == [*REFUSED]
