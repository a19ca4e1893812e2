"""Weights for samples of a generator whose probabilities are not quite the trainer's.

Truncated importance sampling per token: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl, with a cap of 2;
per sequence: the same of the product over its tokens. Masking: https://arxiv.org/abs/2510.18855, where the ratio counts
inside a range on either side of 1 and its token is left out beyond.
"""

from __future__ import annotations

from typing import Literal

import torch

RolloutCorrection = Literal["none", "token_tis", "sequence_tis", "mask"]

# exp() of more than this is far beyond any cap, and of much more infinite.
_MAX_LOG_RATIO = 20.0


def rollout_weights(
    old_logprobs: torch.Tensor,  # (R,) of one sequence, the trainer's
    behaviour_logprobs: torch.Tensor,  # (R,) the generator's
    kind: RolloutCorrection,
    cap: float,
) -> torch.Tensor | None:
    """(R,) fp32 weight of each token's policy loss, without gradient; None for no correction."""
    if kind == "none":
        return None
    log_ratio = old_logprobs.float() - behaviour_logprobs.to(old_logprobs.device).float()
    if kind == "sequence_tis":
        log_ratio = log_ratio.sum().expand_as(log_ratio)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if kind == "mask":
        return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0.0)
    return ratio.clamp(max=cap)
