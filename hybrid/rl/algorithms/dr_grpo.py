"""GRPO done right: no division by the group's spread, which favours questions that are nearly solved or hopeless, and
none by each sequence's own length, which favours long wrong answers.

Liu et al. 2025, https://arxiv.org/abs/2503.20783. Defaults there: no KL penalty; tokens' losses are added up and
divided by a constant, the most tokens that a completion may have. The loss is PPO's.
"""

from __future__ import annotations

from hybrid.rl.advantages import over_tokens, score_statistics, sequence_scores
from hybrid.rl.records import AdvantageInputs, Advantages


def advantages(inputs: AdvantageInputs) -> Advantages:
    """``R - mean(group)`` at each token of a sequence."""
    scores = sequence_scores(inputs)
    _, means, _ = score_statistics(inputs, scores)
    return Advantages(over_tokens(scores - means, inputs))
