"""Values that make no sense are refused with the value and what to set."""

from __future__ import annotations

import dataclasses
from typing import Any, cast, get_args

import pytest

from hybrid.config import (
    SCHEDULE_EXAMPLES,
    InferenceConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    PPOSettings,
    RunConfig,
    Schedule,
    ZeroConfig,
)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (PPOConfig, {"cliprange": 0.0}, r"cliprange=0.0 must be positive"),
        (PPOConfig, {"top_p": 0.0}, r"top_p=0.0 is out of range; it must be in \(0, 1\]"),
        (PPOConfig, {"lam": 1.5}, r"lam=1.5 is out of range; it must be in \[0, 1\]"),
        (PPOConfig, {"num_generations": 0}, r"num_generations=0 is too small; set it to 1 or more"),
        (PPOConfig, {"num_minibatches": 33}, r"num_minibatches=33 is more than the 32 samples of a step"),
        (PPOConfig, {"kl_target": 0.0}, r"kl_target=0.0 must be positive"),
        (PPOConfig, {"kl_estimator": "k4"}, r"choose k1, k2 or k3"),
        (OptimConfig, {"learning_rate": float("nan")}, r"learning_rate=nan is too small"),
        (OptimConfig, {"betas": (0.9, 1.0)}, r"two numbers in \[0, 1\)"),
        (ZeroConfig, {"stage": 4}, r"choose 0, 1, 2 or 3"),
        (InferenceConfig, {"kv_blocks": 0}, r"kv_blocks=0 is too small"),
        (InferenceConfig, {"kv_memory_fraction": 0.0}, r"kv_memory_fraction=0.0 is out of range"),
        (ParallelConfig, {"tp_size": 0}, r"tp_size=0 is too small"),
        (RunConfig, {"total_steps": 0}, r"total_steps=0 is too small"),
    ],
)
def test_a_value_out_of_range_is_refused(config: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_tp_size_must_divide_the_world() -> None:
    ParallelConfig(tp_size=2).check_world(4)
    with pytest.raises(
        ValueError, match=r"tp_size=3 does not divide the world of 4 ranks; set --tp_size to one of 1, 2, 4"
    ):
        ParallelConfig(tp_size=3).check_world(4)
    with pytest.raises(ValueError, match=r"the world of 1 rank; set --tp_size 1, or start"):
        ParallelConfig(tp_size=3).check_world(1)


def test_schedules_work_with_the_numbers_of_steps_and_what_the_configuration_asks_for() -> None:
    import torch
    from transformers import get_scheduler

    for name in get_args(Schedule):
        example = SCHEDULE_EXAMPLES.get(name)
        OptimConfig(lr_scheduler=name, lr_scheduler_kwargs=example)
        arguments = {key: float(value) for key, value in [example.split("=")]} if example else {}
        get_scheduler(name, torch.optim.SGD([torch.zeros(1)]), 2, 10, arguments)
        if example:
            with pytest.raises(ValueError, match=f"'{name}' needs arguments of its own; set lr_scheduler_kwargs, to"):
                OptimConfig(lr_scheduler=name)
    with pytest.raises(ValueError, match="lr_scheduler='greedy' is unknown; choose one of constant, "):
        OptimConfig(lr_scheduler=cast(Any, "greedy"))


@pytest.mark.parametrize("config", list(PPOSettings.__annotations__.values()))
def test_configurations_are_frozen_keyword_only_and_explained(config: Any) -> None:
    from typing import get_type_hints

    kind = get_type_hints(PPOSettings)[next(k for k, v in PPOSettings.__annotations__.items() if v == config)]
    assert kind.__dataclass_params__.frozen
    for field in dataclasses.fields(kind):
        assert field.kw_only
        assert field.metadata["help"], field.name
