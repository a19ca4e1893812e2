"""Several rewards: their weighted sum, who abstains, and names that stay apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hybrid.rewards import (
    CombinedReward,
    FunctionReward,
    Reward,
    RewardError,
    RewardOutput,
    combine_rewards,
    load_reward,
)

PROMPTS = ["p0", "p1", "p2"]
COMPLETIONS = ["a", "bb", "ccc"]
IDS = [[1], [2], [3]]


def length(completions: list[str]) -> list[int]:
    return [len(completion) for completion in completions]


def odd_ones(completions: list[str]) -> list[float | None]:
    return [1.0 if len(completion) % 2 else None for completion in completions]


def score(reward: Reward, **columns: list[Any]) -> Any:
    return reward.score(PROMPTS, COMPLETIONS, IDS, columns)


def test_the_weighted_sum_of_those_that_have_a_say() -> None:
    output = score(CombinedReward([length, odd_ones], [0.5, 10.0]))
    assert output.rewards == [10.5, 1.0, 11.5]
    assert output.parts == {"length": [1.0, 2.0, 3.0], "odd_ones": [1.0, None, 1.0]}
    assert score(CombinedReward([length, odd_ones])).rewards == [2.0, 2.0, 4.0]


def test_a_sample_of_which_nobody_has_a_say_is_masked() -> None:
    assert score(CombinedReward([odd_ones, FunctionReward(odd_ones, name="b")])).rewards == [2.0, None, 2.0]


def test_a_sample_that_was_cut_off_is_masked_whatever_the_others_say() -> None:
    def slow(completion: str) -> float:
        time.sleep(0.3 * (completion == "bb"))
        return 1.0

    with pytest.warns(UserWarning, match="slow took longer"):
        output = score(CombinedReward([length, FunctionReward(slow, timeout=0.1)]))
    assert output.rewards == [2.0, None, 4.0]
    assert output.timed_out == (1,)


def test_one_reward_without_a_weight_stays_as_it_is() -> None:
    reward = FunctionReward(length)
    assert combine_rewards([reward]) is reward
    assert score(combine_rewards([reward], [2.0])).rewards == [2.0, 4.0, 6.0]


def test_names_that_are_shared_are_told_apart(tmp_path: Path) -> None:
    for name in ("math", "style"):
        (tmp_path / f"{name}.py").write_text(
            "def score(completion):\n    return {'score': 1.0, 'words': len(completion.split())}\n"
        )
    rewards = [load_reward(f"{tmp_path / name}.py:score", timeout=0) for name in ("math", "style")]
    output = score(CombinedReward([*rewards, FunctionReward(length), FunctionReward(length)]))
    assert sorted(output.parts) == sorted(
        [f"{name}.score{part}" for name in ("math", "style") for part in ("", "/words", "/timed_out")]
        + ["length", "length_2"]
    )


def test_models_are_asked_before_functions() -> None:
    order: list[str] = []

    class Model:
        name = "model"

        def score(
            self,
            prompts: list[str],
            completions: list[str],
            completion_ids: list[list[int]],
            columns: dict[str, list[Any]],
        ) -> RewardOutput:
            order.append("model")
            return RewardOutput([1.0] * len(prompts), {"model": [1.0] * len(prompts)})

    def function(completions: list[str]) -> list[float]:
        order.append("function")
        return [1.0] * len(completions)

    output = score(CombinedReward([function, Model()], [1.0, 3.0]))
    assert order == ["model", "function"]
    assert output.rewards == [4.0] * 3
    assert CombinedReward([function, Model()]).score([], [], [], {}).rewards == []


def test_what_one_of_them_needs_is_checked() -> None:
    def graded(completions: list[str], grade: list[int]) -> list[int]:
        return grade

    reward = CombinedReward([length, graded])
    with pytest.raises(ValueError, match="graded needs grade"):
        reward.check_columns(["answer"])
    with pytest.raises(RewardError, match="graded returned 2 rewards for 3 samples"):
        score(reward, grade=[1, 2])


@pytest.mark.parametrize("weights", [[1.0], [1.0, float("nan")], [1.0, 2.0, 3.0]])
def test_a_weight_for_each(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="must be 2 finite numbers, one for each reward"):
        CombinedReward([length, odd_ones], weights)
