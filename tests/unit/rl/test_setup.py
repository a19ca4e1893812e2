"""Which models a run finds: none that its algorithm has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid.config import (
    CriticConfig,
    DataConfig,
    InferenceConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    PPOSettings,
    RunConfig,
    ZeroConfig,
)
from hybrid.rl.setup import find_inputs


def _settings(actor: Path, *, critic_learning_rate: float = 1e-5, roles: Any = None, **ppo: Any) -> PPOSettings:
    return PPOSettings(
        ModelConfig(actor=str(actor), **(roles or {})),
        DataConfig(apply_chat_template=False),
        PPOConfig(max_prompt_length=64, max_completion_length=8, **ppo),
        OptimConfig(),
        CriticConfig(critic_learning_rate=critic_learning_rate),
        ZeroConfig(),
        InferenceConfig(),
        ParallelConfig(),
        RunConfig(),
    )


@pytest.mark.parametrize(
    ("ppo", "has_critic", "has_ref"),
    [
        ({}, True, True),
        ({"kl_coef": 0.0}, True, False),
        ({"algorithm": "grpo"}, False, True),
        ({"algorithm": "grpo", "kl_coef": 0.0}, False, False),
        ({"algorithm": "dapo"}, False, False),
    ],
)
def test_no_model_without_a_use(tiny_llama: Path, ppo: dict[str, Any], has_critic: bool, has_ref: bool) -> None:
    inputs = find_inputs(_settings(tiny_llama, **ppo))
    assert (inputs.critic is not None, inputs.ref is not None) == (has_critic, has_ref)


def test_a_critic_for_an_algorithm_without_one_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="and grpo has none; leave --critic out"):
        find_inputs(_settings(tiny_llama, roles={"critic": str(tiny_llama)}, algorithm="grpo"))
    with pytest.raises(ValueError, match=r"critic_learning_rate=0.001, and grpo has no critic"):
        find_inputs(_settings(tiny_llama, critic_learning_rate=1e-3, algorithm="grpo"))


def test_a_reference_that_is_not_used_is_said(tiny_llama: Path) -> None:
    with pytest.warns(UserWarning, match="is not loaded, since kl_coef=0; set --kl_coef to use it"):
        find_inputs(_settings(tiny_llama, roles={"ref": str(tiny_llama)}, algorithm="dapo"))


def test_several_rewards_are_found_and_the_critic_starts_from_the_model_among_them(
    tiny_llama: Path, tiny_reward_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("def score(completions): return [1.0] * len(completions)\n")
    names = (f"{tmp_path}/reward.py:score", str(tiny_reward_model))
    inputs = find_inputs(_settings(tiny_llama, roles={"reward": names, "reward_weights": (1.0, 0.5)}))
    assert len(inputs.rewards) == 2 and inputs.critic is inputs.rewards[1]
