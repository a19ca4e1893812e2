"""Clipped importance sampling policy optimisation: the ratio is clipped as a weight, so no token loses its gradient.

MiniMax 2025 (MiniMax-M1), section 3.1, https://arxiv.org/abs/2506.13585. Defaults there: no bound below, all tokens
averaged, no KL penalty; for the bound above see https://arxiv.org/abs/2510.13786. Advantages are GRPO's.
"""

from __future__ import annotations

from hybrid.rl.records import ClipRange, PolicyTokens, Surrogate


def weighted_log_prob_loss(tokens: PolicyTokens, clip: ClipRange) -> Surrogate:
    """``-clip(ratio, 1 - low, 1 + high) * A * log-prob`` at each token, without gradient through the ratio."""
    ratio = (tokens.logprobs.detach() - tokens.old_logprobs).exp()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Surrogate(-weight * tokens.advantages * tokens.logprobs, weight != ratio)
