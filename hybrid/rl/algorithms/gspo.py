"""Group sequence policy optimisation: the probability ratio is the sequence's, and so is its clipping.

Zheng et al. 2025, https://arxiv.org/abs/2507.18071. Defaults there: clip range 3e-4 below and 4e-4 above, sequences
averaged, no KL penalty. Advantages are GRPO's.
"""

from __future__ import annotations

import torch

from hybrid.rl.algorithms.ppo import bounded_ratio, surrogate_of
from hybrid.rl.records import ClipRange, PolicyTokens, Surrogate


def sequence_surrogate(tokens: PolicyTokens, clip: ClipRange) -> Surrogate:
    """PPO's surrogate at the ratio ``s_i = exp(mean of log-ratios over sequence i)``.

    In the token form (section 4.3): each token has the value of ``s_i`` and its own log-prob's gradient. Averaged over
    a sequence of one advantage, value and gradient are those of the sequence's own form.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    lengths = torch.tensor(tokens.lengths, dtype=torch.int64, device=log_ratio.device)
    sequences = torch.arange(len(lengths), device=log_ratio.device).repeat_interleave(lengths)
    fixed = log_ratio.detach()
    means = fixed.new_zeros(len(lengths)).index_add_(0, sequences, fixed) / lengths.clamp(min=1)
    # 1 in value: the log-prob less itself.
    ratio = bounded_ratio(means[sequences]) * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return surrogate_of(ratio, tokens.advantages, clip)
