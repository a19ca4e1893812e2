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
    PPORunConfig,
    PPOSettings,
    ZeroConfig,
)
from hybrid.rewards import FunctionReward
from hybrid.rl.setup import PPOInputs, find_inputs


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
        PPORunConfig(),
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


def _prompts(tmp_path: Path, count: int, **data: Any) -> DataConfig:
    rows = (f'{{"prompt": "what is {number}?", "answer": {number}}}\n' for number in range(count))
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    return DataConfig(prompts=str(tmp_path / "prompts.jsonl"), apply_chat_template=False, **data)


def _found(actor: Path, data: DataConfig, **ppo: Any) -> PPOInputs:
    settings = _settings(actor, **ppo)._replace(data=data)
    return find_inputs(settings, reward=FunctionReward(lambda completions: [0.0] * len(completions)))


def test_prompts_are_held_out_by_size_or_come_from_elsewhere(tiny_llama: Path, tmp_path: Path) -> None:
    inputs = _found(tiny_llama, _prompts(tmp_path, 20, eval_size=6))
    texts = {prompt.text for prompt in inputs.prompts.rows}
    assert len(inputs.held_out) == 6 and len(texts) == 14
    assert not texts & {prompt.text for prompt in inputs.held_out}
    assert inputs.shown == inputs.held_out
    again = _found(tiny_llama, _prompts(tmp_path, 20, eval_size=6))
    assert again.held_out == inputs.held_out

    (tmp_path / "held_out.jsonl").write_text('{"prompt": "why?", "answer": 1}\n')
    inputs = _found(tiny_llama, _prompts(tmp_path, 20, eval_prompts=str(tmp_path / "held_out.jsonl")))
    assert [prompt.text for prompt in inputs.held_out] == ["why?"] and len(inputs.prompts) == 20


def test_holding_out_keeps_every_source_and_its_weight(tiny_llama: Path, tmp_path: Path) -> None:
    data = _prompts(tmp_path, 20)
    (tmp_path / "others.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(5)))
    sources = (str(data.prompts), str(tmp_path / "others.jsonl"))
    inputs = _found(tiny_llama, DataConfig(prompts=sources, prompt_weights=(1.0, 3.0), eval_size=8))
    assert sum(inputs.prompts.sizes) == 17 and len(inputs.prompts.sizes) == 2 and min(inputs.prompts.sizes) >= 1
    epoch = inputs.prompts.batch(0, 17, seed=0)
    assert sum(prompt.text.startswith("say") for prompt in epoch) == 13  # three of four draws
    with pytest.raises(ValueError, match="eval_size=24 of 25 prompts leaves a source without any"):
        _found(tiny_llama, DataConfig(prompts=sources, eval_size=24))
    with pytest.raises(ValueError, match="eval_size=25 of 25 rows leaves none to train on"):
        _found(tiny_llama, DataConfig(prompts=sources, eval_size=25))


def test_the_table_of_samples_shows_every_source_where_nothing_is_held_out(tiny_llama: Path, tmp_path: Path) -> None:
    data = _prompts(tmp_path, 20)
    (tmp_path / "others.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(20)))
    inputs = _found(tiny_llama, DataConfig(prompts=(str(data.prompts), str(tmp_path / "others.jsonl"))))
    assert not inputs.held_out and len(inputs.shown) == 6
    assert {prompt.text.split()[0] for prompt in inputs.shown} == {"what", "say"}


def test_evaluating_nothing_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="eval_steps=5 changes nothing: .*; set --eval_prompts or --eval_size"):
        _found(tiny_llama, _prompts(tmp_path, 20), eval_steps=5)


def test_ptx_needs_both_its_data_and_its_weight(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "%s"}\n' % ("many words " * 20))
    data = _prompts(tmp_path, 20, ptx_data=str(tmp_path / "texts.jsonl"))
    inputs = _found(tiny_llama, data, ptx_coef=2.0)
    assert inputs.ptx is not None
    (example,) = inputs.ptx.rows
    assert len(example.token_ids) == 64 + 8  # cut to what a sample may have
    assert example.num_scored >= 64 + 7
    with pytest.raises(ValueError, match=r"ptx_data='.*texts.jsonl' does nothing without ptx_coef; set --ptx_coef too"):
        _found(tiny_llama, data)
    with pytest.raises(ValueError, match=r"ptx_coef=2.0 does nothing without ptx_data; set --ptx_data too"):
        _found(tiny_llama, _prompts(tmp_path, 20), ptx_coef=2.0)
