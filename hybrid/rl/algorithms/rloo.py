"""REINFORCE leave-one-out: a completion's baseline is the mean reward of the prompt's other completions.

Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. Defaults there: groups of 2 or 4, KL penalty in the reward
(0.03 on TL;DR), the whole completion one action, no clipping and no ratio.
"""

from __future__ import annotations

import torch

from hybrid.rl.advantages import over_tokens, score_statistics, sequence_scores
from hybrid.rl.records import AdvantageInputs, Advantages, ClipRange, PolicyTokens, Surrogate


def advantages(inputs: AdvantageInputs) -> Advantages:
    """``R_i - mean of R_j, j != i`` at each token; 0 for a sequence whose group has lost the others.

    That is ``k / (k - 1)`` times the difference to the mean of all k.
    """
    scores = sequence_scores(inputs)
    counts, means, _ = score_statistics(inputs, scores)
    return Advantages(over_tokens((scores - means) * counts / (counts - 1).clamp(min=1), inputs))


def log_prob_loss(tokens: PolicyTokens, clip: ClipRange) -> Surrogate:
    """``-A * log-prob`` at each token, whose gradient is REINFORCE's; nothing is clipped."""
    del clip
    return Surrogate(-tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.advantages, dtype=torch.bool))
