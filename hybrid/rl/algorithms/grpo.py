"""Group relative policy optimisation: a completion is compared with the others of its prompt, in place of a critic.

Shao et al. 2024 (DeepSeekMath), section 4.1, https://arxiv.org/abs/2402.03300. Defaults there: KL coefficient 0.04,
k3 in the loss, each sequence's tokens averaged and then the sequences; groups of 64. The loss is PPO's.
"""

from __future__ import annotations

from hybrid.rl.advantages import over_tokens, score_statistics, sequence_scores
from hybrid.rl.records import AdvantageInputs, Advantages

# Keeps a group of equal rewards, whose advantages are 0, from being divided by 0. Implementations differ (1e-4, 1e-6);
# the paper has none.
_EPSILON = 1e-6


def advantages(inputs: AdvantageInputs) -> Advantages:
    """``(R - mean(group)) / std(group)`` at each token of a sequence, with the unbiased std."""
    scores = sequence_scores(inputs)
    _, means, stds = score_statistics(inputs, scores)
    return Advantages(over_tokens((scores - means) / (stds + _EPSILON), inputs))
