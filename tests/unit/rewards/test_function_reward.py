"""A user's function goes wrong in many ways; each is one sentence that says where."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid.rewards import FunctionReward, RewardError, load_reward
from hybrid.rewards import function as function_module

PROMPTS = ["p0", "p1", "p2"]
COMPLETIONS = ["", "yes", "no"]
IDS = [[2], [5, 2], [6]]


def score(function: Any, **columns: list[Any]) -> list[float | None]:
    return FunctionReward(function).score(PROMPTS, COMPLETIONS, IDS, columns).rewards


def test_only_what_the_function_takes_is_passed() -> None:
    def lengths(completion_ids: list[list[int]]) -> list[int]:
        return [len(ids) for ids in completion_ids]

    assert score(lengths, answer=[1, 2, 3]) == [1.0, 2.0, 1.0]


def test_columns_reach_the_function_by_name() -> None:
    def right(completions: list[str], answer: list[str], **rest: Any) -> list[bool]:
        assert sorted(rest) == ["completion_ids", "other", "prompts"]
        return [completion == a for completion, a in zip(completions, answer, strict=True)]

    assert score(right, answer=["", "no", "no"], other=[1, 2, 3]) == [1.0, 0.0, 1.0]


def test_async_functions_are_waited_for_also_inside_a_loop() -> None:
    async def slow(completions: list[str]) -> list[float | None]:
        await asyncio.sleep(0)
        return [None, 1.0, 2.0]

    assert score(slow) == [None, 1.0, 2.0]

    async def notebook() -> list[float | None]:
        return score(slow)

    assert asyncio.run(notebook()) == [None, 1.0, 2.0]


@pytest.mark.parametrize("values", [torch.tensor([1.0, 2.0, 3.0]), (1, 2, 3), [torch.tensor(1.0), 2, 3.0]])
def test_numbers_of_any_kind_become_floats(values: Any) -> None:
    def f(completions: list[str]) -> Any:
        return values

    output = FunctionReward(f, name="mine").score(PROMPTS, COMPLETIONS, IDS, {})
    assert output.rewards == [1.0, 2.0, 3.0]
    assert all(type(reward) is float for reward in output.rewards)
    assert output.parts == {"mine": [1.0, 2.0, 3.0]}


def test_no_samples_need_no_call() -> None:
    def f(completions: list[str]) -> list[float]:
        raise AssertionError("called")

    assert FunctionReward(f).score([], [], [], {}).rewards == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], r"reward function f returned 1 rewards for 3 samples; return one for each"),
        (3.0, r"reward function f returned float; return a list"),
        (None, r"reward function f returned NoneType; return a list"),
        ("yes", r"reward function f returned str"),
        ({"a": 1}, r"reward function f returned dict"),
        ([1.0, float("nan"), 1.0], r"returned nan for sample 1 \(prompt 'p1', completion 'yes'\)"),
        ([1.0, 1.0, float("inf")], r"returned inf for sample 2 "),
        (["1", 1, 1], r"returned '1' for sample 0 "),
        ([10**400, 1, 1], r"returned 1000.* for sample 0 "),
        ([object(), 1, 1], r"returned '<object object at .*>' for sample 0 "),
        ({1.0, 2.0, 3.0}, r"returned set; return a list"),
    ],
)
def test_a_wrong_result_is_named(values: Any, message: str) -> None:
    def f(completions: list[str]) -> Any:
        return values

    with pytest.raises(RewardError, match=message):
        score(f)


def test_the_sample_that_makes_it_raise_is_named() -> None:
    def f(completions: list[str]) -> list[float]:
        return [1.0 / len(completion) for completion in completions]

    message = r"f raised ZeroDivisionError: .*, on sample 0 \(prompt 'p0', completion ''\)"
    with pytest.raises(ValueError, match=message) as caught:
        score(f)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_batch_that_raises_though_no_sample_does() -> None:
    def f(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [1.0]

    with pytest.raises(
        ValueError, match="raised RuntimeError: too many, on a batch of 3 samples, .* the first is sample 0"
    ):
        score(f)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_finding_the_sample_to_blame_takes_few_calls(size: int) -> None:
    for culprit in {0, size // 2, size - 1}:
        calls: list[int] = []

        def f(prompts: list[int], calls: list[int] = calls, culprit: int = culprit) -> list[float]:
            calls.append(len(prompts))
            return [1 / (p - culprit) for p in prompts]

        prompts: Any = list(map(str, range(size)))
        reward = FunctionReward(lambda prompts, f=f: f([int(p) for p in prompts]))
        with pytest.raises(RewardError, match=rf"on sample {culprit} \(prompt '{culprit}'"):
            reward.score(prompts, [""] * size, [[2]] * size, {})
        assert len(calls) <= 17


def test_a_slow_function_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_module, "_BLAME_SECONDS", 0.0)
    calls: list[None] = []

    def f(completions: list[str]) -> list[float]:
        calls.append(None)
        time.sleep(0.01)
        raise TimeoutError("no server")

    with pytest.raises(RewardError, match=r"TimeoutError: no server, on a batch of 3 .* sample 0 \(prompt 'p0'"):
        score(f)
    assert len(calls) == 1


def test_what_it_raised_comes_with_the_frames_of_the_authors_own_code() -> None:
    def f(completions: list[str]) -> list[float]:
        return [parse(completion) for completion in completions]

    async def slow(completions: list[str]) -> list[float]:
        return f(completions)

    def parse(completion: str) -> float:
        return float(completion)

    for function in (f, slow):
        with pytest.raises(RewardError) as caught:
            score(function)
        assert "in parse" in caught.value.details and caught.value.details.count("File ") <= 4
        assert "hybrid/rewards" not in caught.value.details and "asyncio" not in caught.value.details


def test_leaving_the_program_is_an_error_too() -> None:
    def f(completions: list[str]) -> list[float]:
        sys.exit("no key for the judge")

    with pytest.raises(RewardError, match="raised SystemExit: no key for the judge, on sample 0"):
        score(f)


def test_a_missing_column_is_named() -> None:
    def f(completions: list[str], answer: list[str], weight: float = 1.0) -> list[float]:
        return []

    with pytest.raises(ValueError, match=r"f needs answer; besides prompts, .* the prompts have label"):
        FunctionReward(f).check_columns(["label"])


def test_load_reward(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("LIMIT = 3\ndef length(completions):\n    return [len(c) for c in completions]\n")
    reward = load_reward(f"{file}:length")
    assert reward.name == "length"
    assert reward.score(PROMPTS, COMPLETIONS, IDS, {}).rewards == [0.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_reward.py", "write it as file.py:function"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("my_reward.py:lenght", "has no function lenght; did you mean length?"),
        ("my_reward.py:zzz", "has no function zzz; it defines length"),
        ("my_reward.py:LIMIT", "LIMIT is a int, not a function"),
        ("broken.py:f", "cannot be imported: ModuleNotFoundError: No module named 'not_there'"),
        ("syntax.py:f", "cannot be imported: SyntaxError"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text("LIMIT = 3\ndef length(completions):\n    return [len(c) for c in completions]\n")
    Path("broken.py").write_text("import not_there\n")
    Path("syntax.py").write_text("def f(:\n")
    with pytest.raises(ValueError) as caught:
        load_reward(path)
    assert message in str(caught.value)
