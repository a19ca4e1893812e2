"""What each algorithm sets, what wins over it, and which combinations are refused with their reason."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import yaml

from hybrid.algorithms import ALGORITHMS, AlgorithmName, PPOConfig
from hybrid.arguments import parse_arguments, to_flags


def test_the_names_are_those_of_the_table() -> None:
    assert list(get_args(AlgorithmName)) == list(ALGORITHMS)
    assert all(traits.paper.startswith("https://arxiv.org/abs/") for traits in ALGORITHMS.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "cliprange_low": 0.2, "reward_clip": 5.0}),
        ("grpo", {"kl_coef": 0.04, "kl_in": "loss", "kl_estimator": "k3", "aggregation": "sequence_mean"}),
        ("dr_grpo", {"kl_coef": 0.0, "aggregation": "sum_over_constant"}),
        ("rloo", {"kl_in": "reward", "cliprange_low": None, "cliprange_high": None}),
        ("reinforce_pp", {"kl_in": "reward", "kl_estimator": "k1", "num_generations": 1}),
        ("reinforce_pp_baseline", {"kl_in": "loss", "kl_estimator": "k2"}),
        ("dapo", {"cliprange_low": 0.2, "cliprange_high": 0.28, "dynamic_sampling": True, "overlong_buffer": 51}),
        ("gspo", {"cliprange_low": 3e-4, "cliprange_high": 4e-4, "aggregation": "sequence_mean"}),
        ("cispo", {"cliprange_low": 1.0, "cliprange_high": 4.0, "aggregation": "token_mean"}),
    ],
)
def test_an_algorithm_sets_its_papers_values(name: Any, expected: dict[str, Any]) -> None:
    config = PPOConfig(algorithm=name)
    assert {field: getattr(config, field) for field in expected} == expected


def test_what_is_given_wins() -> None:
    config = PPOConfig(algorithm="grpo", kl_coef=0.0, num_generations=3, aggregation="token_mean", cliprange=0.1)
    assert (config.kl_coef, config.num_generations, config.aggregation) == (0.0, 3, "token_mean")
    assert (config.cliprange_low, config.cliprange_high) == (0.1, 0.1)
    mixed = PPOConfig(cliprange=0.1, cliprange_high=0.3)
    assert (mixed.cliprange_low, mixed.cliprange_high) == (0.1, 0.3)
    assert PPOConfig(algorithm="dapo", dynamic_sampling=False, overlong_buffer=0).overlong_buffer == 0


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_saved_configuration_reads_back(name: Any, tmp_path: Any) -> None:
    config = PPOConfig(algorithm=name, temperature=0.5)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_flags([config])))
    (again,) = parse_arguments([PPOConfig], ["--config", str(tmp_path / "config.yaml")])
    assert again == config


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_copy_with_another_size_is_the_same_algorithm(name: Any) -> None:
    config = PPOConfig(algorithm=name)
    assert dataclasses.replace(config, prompts_per_step=3).aggregation == config.aggregation


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "trpo"}, r"algorithm='trpo' is unknown; choose ppo, grpo, .* or cispo"),
        ({"algorithm": "grpo", "num_generations": 1}, "num_generations=1 leaves grpo nothing to compare"),
        ({"algorithm": "rloo", "num_generations": 1}, "num_generations=1 leaves rloo nothing to compare"),
        ({"num_generations": 1, "dynamic_sampling": True}, "leaves dynamic_sampling nothing to compare"),
        ({"algorithm": "grpo", "lam": 0.9}, "lam=0.9, and grpo has no critic; leave --lam out, or set --algorithm ppo"),
        ({"algorithm": "rloo", "vf_coef": 0.5}, "vf_coef=0.5, and rloo has no critic"),
        ({"algorithm": "dapo", "cliprange_value": 0.5}, "cliprange_value=0.5, and dapo has no critic"),
        ({"algorithm": "grpo", "gamma": 0.9}, "gamma=0.9, and grpo has no discounted rewards"),
        ({"algorithm": "rloo", "cliprange": 0.2}, "cliprange=0.2, and rloo has no probability ratio to clip"),
        ({"algorithm": "rloo", "cliprange_high": 0.3}, "cliprange_high=0.3, and rloo has no probability ratio"),
        ({"algorithm": "rloo", "dual_clip": 3.0}, "dual_clip=3.0, and rloo has no probability ratio"),
        ({"algorithm": "rloo", "num_ppo_epochs": 2}, "num_ppo_epochs=2, and rloo has no probability ratio"),
        ({"algorithm": "cispo", "dual_clip": 3.0}, "dual_clip=3.0, and cispo bounds the ratio itself"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 would bound what no ratio has moved; set it to more than 1"),
        ({"kl_in": "loss"}, "kl_estimator='k1' in the loss has a gradient that is 0 on average"),
        ({"kl_coef": 0.0, "kl_target": 6.0}, "kl_target=6.0 adapts kl_coef, which is 0"),
        ({"early_stop_kl": 0.1}, "early_stop_kl=0.1 stops further updates, and a step has but one"),
        ({"whiten_by": "group"}, "whiten_by='group' says how advantages are whitened, and they are not"),
        ({"rollout_correction_cap": 5.0}, "rollout_correction_cap=5.0 has no effect without rollout_corr"),
        ({"max_resamplings": 3}, "max_resamplings=3 has no effect without dynamic_sampling; set --dynamic_sampling"),
        ({"overlong_penalty": 0.5}, "overlong_penalty=0.5 has no effect without overlong_buffer"),
        ({"rollout_correction": "tis"}, "choose none, token_tis, sequence_tis or mask"),
        ({"aggregation": "mean"}, "choose token_mean, sequence_mean or sum_over_constant"),
        ({"overlong_buffer": 300}, "overlong_buffer=300 is more than max_completion_length=256"),
        ({"cliprange_low": 1.5}, r"cliprange_low=1.5 is out of range; it must be in \(0, 1\]"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**values)


def test_settings_without_a_use_in_other_algorithms_have_one_here() -> None:
    PPOConfig(algorithm="reinforce_pp", gamma=0.9)
    PPOConfig(kl_in="loss", kl_estimator="k2")
    PPOConfig(kl_in="loss", kl_coef=0.0)
    PPOConfig(num_minibatches=2, early_stop_kl=0.1)
