"""The demo's task: checkable, dense in reward, with a split that holds."""

from __future__ import annotations

import pytest

from hybrid.data.tasks import LargerNumberTask, larger_number


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" 42", 1.0),
        ("42.\n", 1.0),
        (" 42 is larger", 0.75),
        (" 17", 0.75),
        (" 17 or 42", 0.5),
        (" 5", 0.5),
        (" 5 apples", 0.25),
        (" 420", 0.5),
        (" The answer is 42", 0.0),
        ("", 0.0),
    ],
)
def test_partial_credit(completion: str, reward: float) -> None:
    assert larger_number([completion], answer=[42], numbers=[(17, 42)], prompts=[""]) == [reward]


def test_rows_are_deterministic_and_splits_are_disjoint() -> None:
    task = LargerNumberTask()
    assert task.rows(seed=3) == task.rows(seed=3)
    assert task.rows(seed=3) != task.rows(seed=4)
    train = {frozenset(row["numbers"]) for row in task.rows("train", size=20_000)}
    test = {frozenset(row["numbers"]) for row in task.rows("test", size=2_000)}
    assert not train & test
    assert len(test) > 300


def test_answers_are_right_and_either_place() -> None:
    rows = LargerNumberTask().rows(size=200)
    assert all(row["answer"] == max(row["numbers"]) and str(row["answer"]) in row["prompt"] for row in rows)
    assert 60 < sum(row["numbers"][0] == row["answer"] for row in rows) < 140
