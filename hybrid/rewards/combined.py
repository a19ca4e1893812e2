"""Several rewards as one: their weighted sum."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid.rewards.function import FunctionReward
from hybrid.rewards.protocol import Reward, RewardError, RewardOutput


class CombinedReward:
    """The weighted sum of several rewards.

    Where one says None the others' sum stands, so that each may judge those samples that it is for; a sample is masked
    if all say None, or if one was cut off at its time limit. `RewardOutput.parts` holds each one's scores without its
    weight, by its name; those that share a name are told apart by their files, or else by a number.

    Args:
        rewards: what is summed. Models, whose forwards may be collective, are asked before functions, which may fail.
        weights: one for each (default: 1).
    """

    def __init__(self, rewards: Sequence[Reward | Callable[..., Any]], weights: Sequence[float] | None = None) -> None:
        if not rewards:
            raise ValueError("there are no rewards to combine; give at least one")
        weights = list(weights) if weights else [1.0] * len(rewards)
        if len(weights) != len(rewards) or not all(map(math.isfinite, weights)):
            raise ValueError(f"reward_weights={weights} must be {len(rewards)} finite numbers, one for each reward")
        self.rewards: list[Any] = [r if hasattr(r, "score") else FunctionReward(r) for r in rewards]  # pyright: ignore
        self.weights = weights
        self.names = _distinct_names(self.rewards)

    def score(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: dict[str, list[Any]],
    ) -> RewardOutput:
        """Every reward's scores, and their weighted sum; raises what the rewards raise."""
        outputs: dict[int, RewardOutput] = {}
        for index in sorted(range(len(self.rewards)), key=lambda i: isinstance(self.rewards[i], FunctionReward)):
            outputs[index] = self.rewards[index].score(prompts, completions, completion_ids, columns)
            if len(outputs[index].rewards) != len(prompts):
                raise RewardError(
                    f"the reward {self.names[index]} scored {len(outputs[index].rewards)} samples of {len(prompts)}; "
                    "return one for each"
                )
        parts: dict[str, list[float | None]] = {}
        for index, name in enumerate(self.names):
            own = _name_of(self.rewards[index])
            for part, values in outputs[index].parts.items():
                parts[name + part.removeprefix(own) if part.startswith(own) else f"{name}/{part}"] = values
        timed_out = sorted({sample for output in outputs.values() for sample in output.timed_out})
        rewards = [
            None if sample in timed_out else self._sum([outputs[i].rewards[sample] for i in range(len(self.rewards))])
            for sample in range(len(prompts))
        ]
        return RewardOutput(rewards, parts, tuple(timed_out))

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise ValueError if a function needs a column that is not among ``names``."""
        for reward in self.rewards:
            if hasattr(reward, "check_columns"):
                reward.check_columns(names)

    def close(self) -> None:
        """Close those that can be closed."""
        for reward in self.rewards:
            if hasattr(reward, "close"):
                reward.close()

    def _sum(self, values: Sequence[float | None]) -> float | None:
        said = [weight * value for weight, value in zip(self.weights, values, strict=True) if value is not None]
        return sum(said) if said else None


def _name_of(reward: Any) -> str:
    return getattr(reward, "name", type(reward).__name__)


def _distinct_names(rewards: Sequence[Any]) -> list[str]:
    names = [_name_of(reward) for reward in rewards]
    shared = {name for name, count in Counter(names).items() if count > 1}
    for index, reward in enumerate(rewards):
        origin = getattr(reward, "origin", None)
        if names[index] in shared and origin is not None:
            names[index] = f"{Path(origin.where).stem}.{names[index]}"
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name}_{seen[name]}"
    return names
