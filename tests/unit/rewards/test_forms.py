"""Reward functions written for verl and OpenRLHF, and those for one sample, do as they are; sub-scores are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid.rewards import FunctionReward, RewardError, RewardOutput

PROMPTS = ["1+1=", "2+2="]
COMPLETIONS = ["2", "5"]
IDS = [[5, 2], [6]]


def score(function: Any, **columns: list[Any]) -> RewardOutput:
    return FunctionReward(function, name="f").score(PROMPTS, COMPLETIONS, IDS, columns)


def test_verl_is_called_for_each_sample() -> None:
    seen: list[Any] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.append((data_source, extra_info))
        return float(solution_str == ground_truth)

    output = score(
        compute_score,
        data_source=["gsm8k", "math"],
        ground_truth=["2", "4"],
        extra_info=[{"index": 0}, None],
        ability=["a", "a"],
    )
    assert output.rewards == [1.0, 0.0]
    assert seen == [("gsm8k", {"index": 0}), ("math", {})]


def test_verls_sub_scores_are_kept_apart() -> None:
    def compute_score(solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
        result: dict[str, Any] = {"score": float(solution_str == ground_truth), "format": 0.5, "pred": solution_str}
        return result | ({"acc": True} if solution_str == "2" else {"format": float("nan")})

    output = score(compute_score, answer=["2", "4"])
    assert output.rewards == [1.0, 0.0]
    assert output.parts == {
        "f": [1.0, 0.0],
        "f/format": [0.5, None],
        "f/acc": [1.0, None],
        "f/timed_out": [0.0, 0.0],
    }


def test_verls_form_for_batches() -> None:
    def compute_score(
        data_sources: list[Any], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
    ) -> list[Any]:
        assert data_sources == [None, None] and extra_infos == [{}, {}]
        return [{"score": float(a == b), "length": len(a)} for a, b in zip(solution_strs, ground_truths, strict=True)]

    output = score(compute_score, solution=["2", "4"])
    assert output.parts == {"f": [1.0, 0.0], "f/length": [1.0, 1.0]}


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("column", ["ground_truth", "answer", "solution", "label", "labels"])
def test_openrlhf(as_dict: bool, column: str) -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
        assert prompts == PROMPTS
        rewards = torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
        logs = {"length": torch.tensor([4, 4]), "judges": 3}
        return {"rewards": rewards, "scores": rewards / 2, "extra_logs": logs} if as_dict else rewards

    output = score(reward_func, **{column: ["=2", "=4"]})
    assert output.rewards == [1.0, 0.0]
    extras = {"f/scores": [0.5, 0.0], "f/length": [4.0, 4.0], "f/judges": [3.0, 3.0]}
    assert output.parts == {"f": [1.0, 0.0], **(extras if as_dict else {})}


def test_openrlhf_without_labels_and_with_keywords() -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[None], **rest: Any) -> list[int]:
        assert sorted(rest) == ["completion_ids", "completions", "other"]
        return [len(query) for query in queries if labels[0] is None]

    assert score(reward_func, other=[1, 2]).rewards == [5.0, 5.0]


def test_a_function_of_one_sample() -> None:
    def right(prompt: str, completion: str, completion_ids: list[int], answer: str) -> float | None:
        return None if prompt == "2+2=" else float(completion == answer) + len(completion_ids)

    assert score(right, answer=["2", "4"]).rewards == [3.0, None]


def test_a_column_may_be_called_completion() -> None:
    def similar(completions: list[str], completion: list[str]) -> list[bool]:
        return [a == b for a, b in zip(completions, completion, strict=True)]

    assert score(similar, completion=["2", "4"]).rewards == [1.0, 0.0]


def test_ground_truth_must_be_there_for_those_who_need_it() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str) -> float:
        return 0.0

    reward = FunctionReward(compute_score)
    with pytest.raises(ValueError, match=r"compute_score needs ground_truth; .* the prompts have question"):
        reward.check_columns(["question"])
    reward.check_columns(["label"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", r"f returned 'yes' for sample 0 \(prompt '1\+1=', completion '2'\)"),
        ({"correct": 1}, r"f returned {'correct': 1} for sample 0"),
        ({"score": float("inf")}, r"f returned inf for sample 0"),
        ([1.0], r"f returned \[1.0\] for sample 0"),
    ],
)
def test_a_wrong_result_for_one_sample_is_named(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(lambda completion: value)


def test_a_dict_for_a_batch_needs_rewards() -> None:
    with pytest.raises(RewardError, match=r"f returned dict without rewards or scores; return a list"):
        score(lambda completions: {"reward_list": [1.0, 2.0]})
    with pytest.raises(RewardError, match=r"f returned dict with rewards of float; return a list"):
        score(lambda completions: {"rewards": 1.0})


def test_what_one_sample_raises_names_it() -> None:
    def f(prompt: str, completion: str) -> float:
        return 1.0 / (int(completion) - 5)

    with pytest.raises(RewardError, match=r"f raised ZeroDivisionError: .*, on sample 1 \(prompt '2\+2=', ") as caught:
        score(f)
    assert "in f" in caught.value.details


def test_async_functions_of_one_sample_run_side_by_side() -> None:
    import asyncio

    arrived: list[str] = []

    async def judge(completion: str) -> float:
        arrived.append(completion)
        while len(arrived) < 2:  # each waits for the other
            await asyncio.sleep(0.001)
        return float(completion)

    assert score(judge).rewards == [2.0, 5.0]
