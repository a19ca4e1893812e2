"""From what a reward function returned to one reward a sample, with its sub-scores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.rewards.protocol import RewardError

# Where a mapping holds the reward itself, best first: our own and OpenRLHF's names for a batch, verl's for a sample.
_BATCH_KEYS = ("rewards", "scores")
_SAMPLE_KEYS = ("score", "reward")

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class Scores:
    rewards: Values
    extras: dict[str, Values] = field(default_factory=dict)  # sub-scores by name


def read_scores(result: Any, kind: str, count: int, who: str, describe: Callable[[int], str]) -> Scores:
    """One reward for each of ``count`` samples from plain data, and every other number that came with them.

    Args:
        result: a list of numbers, of None, or of mappings with a ``score``; or a mapping with such a list as
            ``rewards`` or ``scores``, and lists or numbers besides, in ``extra_logs`` too.
        kind: the class that was returned, for an error.
        who: what returned it.
        describe: says which sample a number is of.

    Raises:
        RewardError: anything else, another count, or a reward that is no finite number.
    """
    extras: dict[str, Values] = {}
    if isinstance(result, Mapping):
        key = next((key for key in _BATCH_KEYS if key in result), None)
        if key is None:
            raise RewardError(
                f"{who} returned {kind} without {' or '.join(_BATCH_KEYS)}; return a list with one number (or None, "
                "to mask it) for each sample"
            )
        others = {name: item for name, item in result.items() if name not in (key, "extra_logs")}
        logs = result.get("extra_logs")
        extras = _batch_extras({**others, **(logs if isinstance(logs, Mapping) else {})}, count)
        result = result[key]
        kind = f"{kind} with {key} of {type(result).__name__}" if not isinstance(result, list) else kind
    if not isinstance(result, list):
        raise RewardError(f"{who} returned {kind}; return a list with one number (or None, to mask it) for each sample")
    if len(result) != count:
        raise RewardError(f"{who} returned {len(result)} rewards for {count} samples; return one for each")
    rewards: Values = []
    for index, value in enumerate(result):
        if isinstance(value, Mapping):
            value = _sample_score(value, index, count, extras)
        if value is not None and _number(value) is None:
            raise RewardError(
                f"{who} returned {value!r} for {describe(index)}; return a finite number, or None to mask the sample"
            )
        rewards.append(None if value is None else float(value))
    return Scores(rewards, extras)


def _sample_score(value: Mapping[str, Any], index: int, count: int, extras: dict[str, Values]) -> Any:
    """The reward in a sample's mapping, whose other numbers go to ``extras``; the mapping itself if it has none."""
    key = next((key for key in _SAMPLE_KEYS if key in value), None)
    if key is None:
        return value
    for name, item in value.items():
        if name != key and (number := _number(item)) is not None:
            extras.setdefault(name, [None] * count)[index] = number
    return value[key]


def _batch_extras(items: Mapping[str, Any], count: int) -> dict[str, Values]:
    extras: dict[str, Values] = {}
    for name, item in items.items():
        values = item if isinstance(item, list) and len(item) == count else [item] * count
        numbers = [_number(value) for value in values]
        if any(number is not None for number in numbers):
            extras[name] = numbers
    return extras


def _number(value: Any) -> float | None:
    # Neither NaN nor an integer that no float can hold passes the comparison.
    is_finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return float(value) if is_finite else None
