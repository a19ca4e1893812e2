"""REINFORCE++: rewards to go, whitened over the whole batch in place of a critic; also with a baseline by group.

Hu et al. 2025, https://arxiv.org/abs/2501.03262. Defaults there: one completion a prompt with k1 in the reward; with
the baseline several, with k2 in the loss. The loss is PPO's.
"""

from __future__ import annotations

from hybrid.rl.advantages import over_tokens, rewards_to_go, score_statistics, sequence_scores, whiten
from hybrid.rl.records import AdvantageInputs, Advantages


def advantages(inputs: AdvantageInputs) -> Advantages:
    """Each token's discounted rewards to go, whitened over all tokens of the batch."""
    return Advantages(whiten(rewards_to_go(inputs.rewards, inputs.gamma), inputs.reduce))


def baseline_advantages(inputs: AdvantageInputs) -> Advantages:
    """``R - mean(group)`` at each token, whitened over all tokens of the batch."""
    scores = sequence_scores(inputs)
    _, means, _ = score_statistics(inputs, scores)
    return Advantages(whiten(over_tokens(scores - means, inputs), inputs.reduce))
