"""The demo's built-in task: plain text with a checkable answer, hard for a small model at first and soon learned."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_NUMBER = re.compile(r"\s*(\d+)")
_MAX_NUMBER = 99


@dataclass(frozen=True, slots=True)
class LargerNumberTask:
    """Which of two numbers is larger? The answer is to be that number and nothing else.

    Prompts are short, since on a CPU their tokens are most of what a step costs. The pairs of numbers are split once,
    by a seed of their own, so that no pair of the test split, in either order, is ever trained on.
    """

    template: str = "Which number is larger, {a} or {b}?\nAnswer:"
    name: str = "larger_number"

    def rows(
        self, split: Literal["train", "test"] = "train", *, size: int = 512, seed: int = 0
    ) -> list[dict[str, Any]]:
        """``size`` rows with ``prompt``, ``answer`` and ``numbers``; the same for the same arguments."""
        pairs = [(a, b) for a in range(1, _MAX_NUMBER + 1) for b in range(a + 1, _MAX_NUMBER + 1)]
        random.Random("larger_number/split").shuffle(pairs)
        held_out = len(pairs) // 10
        pairs = pairs[:held_out] if split == "test" else pairs[held_out:]
        draw = random.Random(f"larger_number/{split}/{seed}")
        rows = []
        for _ in range(size):
            a, b = draw.choice(pairs)
            if draw.random() < 0.5:
                a, b = b, a
            rows.append({"prompt": self.template.format(a=a, b=b), "answer": max(a, b), "numbers": (a, b)})
        return rows


def larger_number(
    completions: Sequence[str], answer: Sequence[int], numbers: Sequence[tuple[int, int]], **_: Any
) -> list[float]:
    """A quarter each for: it opens with a number; with one of the two; with the larger; and nothing follows it.

    The first quarter alone teaches form, so that a model which rambles has something to climb.
    """
    return [_score(text, a, pair) for text, a, pair in zip(completions, answer, numbers, strict=True)]


def _score(completion: str, answer: int, numbers: tuple[int, int]) -> float:
    found = _NUMBER.match(completion)
    if found is None:
        return 0.0
    number = int(found[1])
    bare = not completion[found.end() :].strip(" .\n")
    return 0.25 * (1 + (number in numbers) + (number == answer) + bare)
