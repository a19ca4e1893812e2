"""Which functions an algorithm is made of. What it needs and sets besides is in ``hybrid.algorithms``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybrid.algorithms import ALGORITHMS, AlgorithmTraits, PolicyObjective
from hybrid.rl.algorithms import cispo, dr_grpo, grpo, gspo, ppo, reinforce_pp, rloo
from hybrid.rl.records import AdvantageInputs, Advantages, ClipRange, PolicyTokens, Surrogate

AdvantageFunction = Callable[[AdvantageInputs], Advantages]
ObjectiveFunction = Callable[[PolicyTokens, ClipRange], Surrogate]

_ADVANTAGES: dict[str, AdvantageFunction] = {
    "ppo": ppo.advantages,
    "grpo": grpo.advantages,
    "dr_grpo": dr_grpo.advantages,
    "rloo": rloo.advantages,
    "reinforce_pp": reinforce_pp.advantages,
    "reinforce_pp_baseline": reinforce_pp.baseline_advantages,
    "dapo": grpo.advantages,
    "gspo": grpo.advantages,
    "cispo": grpo.advantages,
}
_OBJECTIVES: dict[PolicyObjective, ObjectiveFunction] = {
    "clipped": ppo.clipped_surrogate,
    "log_prob": rloo.log_prob_loss,
    "clipped_sequence": gspo.sequence_surrogate,
    "clipped_weight": cispo.weighted_log_prob_loss,
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    traits: AlgorithmTraits
    advantages: AdvantageFunction
    objective: ObjectiveFunction  # the loss of each token


def find_algorithm(name: str) -> Algorithm:
    """Raise ValueError for a name that is in no table."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm={name!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
    traits = ALGORITHMS[name]
    return Algorithm(traits, _ADVANTAGES[name], _OBJECTIVES[traits.objective])
