"""What the trainers ask of a reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


class RewardError(ValueError):
    """A reward did something that it must not: raised, hung, or returned something else than a finite number or None.

    ``details`` is what helps the reward's author besides the message: the traceback's frames in their own code.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """One reward a sample; None masks the sample: it is reported and not trained on."""

    rewards: list[float | None]
    # For the metrics, by function and, for sub-scores, by function/name; None where a sample has none.
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    timed_out: tuple[int, ...] = ()  # samples that were cut off, which no other reward's opinion unmasks


class Reward(Protocol):
    """Scores completions. Every rank calls it equally often, at times with no samples."""

    def score(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> RewardOutput:
        """Score samples given as lists of equal length.

        Args:
            prompts: the text the actor saw.
            completions: the text it added, without special tokens.
            completion_ids: the token ids of that text, end-of-sequence token included.
            columns: what else the prompts' rows hold, by name.
        """
        ...
