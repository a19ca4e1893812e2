"""Several sources as one order: their proportions, no prompt lost, and the same for whoever asks."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data import Prompt, PromptDataset, load_prompts
from hybrid.data.mixing import draws_per_epoch
from tests.tiny import tiny_tokenizer

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=5)


def dataset(name: str, size: int) -> PromptDataset:
    return PromptDataset([Prompt([number], f"{name}{number}") for number in range(size)])


def drawn(prompts: PromptDataset, count: int, *, size: int = 4, seed: int = 0) -> list[str]:
    return [prompt.text for step in range(-(-count // size)) for prompt in prompts.batch(step, size, seed)][:count]


@given(sizes=SIZES, data=st.data())
@settings(max_examples=50, deadline=None)
def test_an_epoch_has_as_many_draws_as_prompts_in_the_weights_proportions(sizes: list[int], data: Any) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    draws = draws_per_epoch(sizes, weights)
    assert sum(draws) == sum(sizes) and min(draws) >= 1
    exact = [Fraction(weight, sum(weights)) * sum(sizes) for weight in weights]
    if min(exact) >= 1:
        assert all(abs(count - share) < 1 for count, share in zip(draws, exact, strict=True))
    assert draws_per_epoch(sizes, None) == tuple(sizes)


def test_without_weights_each_prompt_is_drawn_once_an_epoch() -> None:
    mixed = PromptDataset.mix([dataset("a", 7), dataset("b", 3)])
    assert Counter(drawn(mixed, 20)) == {
        f"{name}{number}": 2 for name, size in (("a", 7), ("b", 3)) for number in range(size)
    }


@pytest.mark.parametrize("weights", [[1.0, 3.0], [3.0, 1.0], [0.2, 0.6]])
def test_weights_say_how_often_a_source_is_drawn_from(weights: list[float]) -> None:
    mixed = PromptDataset.mix([dataset("a", 30), dataset("b", 10)], weights)
    texts = drawn(mixed, 400)
    share = weights[0] / sum(weights)
    by_source = Counter(text[0] for text in texts)
    assert by_source["a"] == pytest.approx(400 * share)
    for name, size in (("a", 30), ("b", 10)):
        # No prompt is drawn again before all of its source were, also from one epoch to the next.
        counts = Counter(text for text in texts if text[0] == name)
        assert len(counts) == size
        assert max(counts.values()) - min(counts.values()) <= 1


def test_the_order_can_be_entered_anywhere_and_differs_by_seed_and_epoch() -> None:
    mixed = PromptDataset.mix([dataset("a", 9), dataset("b", 4)], [1.0, 2.0])
    batches = [mixed.batch(step, 5, seed=3) for step in range(12)]
    again = PromptDataset.mix([dataset("a", 9), dataset("b", 4)], [1.0, 2.0])
    assert [again.batch(step, 5, seed=3) for step in reversed(range(12))] == batches[::-1]
    assert drawn(mixed, 26, seed=1) != drawn(mixed, 26, seed=2)
    assert drawn(mixed, 26)[:13] != drawn(mixed, 26)[13:]
    # Batches of another size, as of another number of ranks' share, are cut from the same sequence.
    assert drawn(mixed, 60, size=5) == drawn(mixed, 60, size=12)


def test_one_prompt_and_fewer_than_a_batch() -> None:
    assert drawn(dataset("a", 1), 5) == ["a0"] * 5
    assert sorted(drawn(PromptDataset.mix([dataset("a", 1), dataset("b", 1)], [5, 1]), 4, size=4)) == [
        *("a0", "a0", "b0", "b0")  # two draws an epoch, and every source has one
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source: Any, **options: Any) -> PromptDataset:
    return load_prompts(source, tiny_tokenizer(), max_prompt_length=20, apply_chat_template=False, **options)


def test_sources_of_different_shapes_share_their_columns(tmp_path: Path) -> None:
    math = write(tmp_path / "math.jsonl", [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}])
    verl = {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "Hi"}], "ability": "x"}
    code = write(tmp_path / "code.jsonl", [{**verl, "reward_model": {"style": "rule", "ground_truth": "7"}}])
    mixed = load((math, code), weights=(1.0, 1.0))
    assert [prompt.columns["ground_truth"] for prompt in mixed.rows] == ["2", "4", "7"]
    assert [prompt.columns["data_source"] for prompt in mixed.rows] == ["math", "math", "gsm8k"]
    assert len({tuple(sorted(prompt.columns)) for prompt in mixed.rows}) == 1  # None where a source has no such column
    assert [prompt.columns["answer"] for prompt in mixed.rows] == ["2", "4", None]


def test_a_yaml_file_lists_sources_with_settings_of_their_own(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"question": "a0"}, {"question": "a1"}, {"question": "a2"}])
    b = write(tmp_path / "b.jsonl", [{"prompt": "b0"}])
    listing = tmp_path / "mix.yaml"
    listing.write_text(f"- prompts: {a}\n  prompt_column: question\n  weight: 1\n- prompts: {b}\n  weight: 3\n")
    mixed = load(str(listing))
    assert (len(mixed), mixed.draws) == (4, (1, 3))
    listing.write_text(f"- prompts: {b}\n")
    assert [prompt.text for prompt in load(str(listing)).rows] == ["b0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts: a", "must be a list of sources"),
        ("[]", "must be a list of sources"),
        ("- a.jsonl", "source 1 of .* names no prompts; write it as prompts: FILE"),
        ("- {prompts: a, wieght: 2}", "source 1 of .* has 'wieght'; it may have prompts, weight"),
        ("- {prompts: a, weight: two}", "has weight 'two'; it must be a number"),
        ("- {prompts: a, weight: -1}", "must be 1 positive number, one for each source"),
        ("{", "cannot be read"),
    ],
)
def test_a_listing_that_is_none_is_named(tmp_path: Path, text: str, message: str) -> None:
    listing = tmp_path / "mix.yaml"
    listing.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(str(listing))


def test_weights_and_a_listing_contradict(tmp_path: Path) -> None:
    listing = tmp_path / "mix.yml"
    listing.write_text("- prompts: a.jsonl\n")
    with pytest.raises(ValueError, match="write the weights into it"):
        load(str(listing), weights=(1.0,))
    with pytest.raises(ValueError, match="there is no such file"):
        load(str(listing))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, float("inf"))])
def test_a_weight_for_each_source(tmp_path: Path, weights: tuple[float, ...]) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [{"prompt": name}]) for name in "ab"]
    with pytest.raises(ValueError, match="must be 2 positive numbers, one for each source of prompts"):
        load(files, weights=weights)
