"""The policy's loss: an algorithm's objective, a KL penalty and an entropy bonus, averaged as the aggregation says.

Losses are sums over the tokens at hand divided by a count of the whole minibatch over all ranks and micro-batches, so
that their gradients add up to the same whatever the split. Metrics are sums over the tokens at hand with their counts,
for the same reason. There may be no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid.algorithms import Aggregation, KLEstimator
from hybrid.rl.kl import kl_estimate
from hybrid.rl.records import PolicyTokens, Surrogate

Sums = dict[str, tuple[torch.Tensor, int]]
"""Scalars without gradient, and how many observations each adds up."""


@dataclass(frozen=True, slots=True)
class Average:
    """How tokens' losses become one number.

    ``token_mean``: over all tokens. ``sequence_mean``: over each sequence's tokens, then over sequences.
    ``sum_over_constant``: added up, divided by the number of sequences and by ``max_completion_length``.
    """

    aggregation: Aggregation
    num_tokens: int  # of the whole minibatch
    num_sequences: int
    max_completion_length: int

    @property
    def denominator(self) -> int:
        return self.num_tokens if self.aggregation == "token_mean" else self.num_sequences

    def count(self, lengths: Sequence[int]) -> int:
        """What sequences of these lengths add to the denominator."""
        return sum(lengths) if self.aggregation == "token_mean" else len(lengths)

    def total(self, values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """(R,) -> the sum whose share of the minibatch is to be divided by the denominator."""
        if self.aggregation == "token_mean":
            return values.sum()
        if self.aggregation == "sum_over_constant":
            return values.sum() / self.max_completion_length
        sizes = torch.tensor(lengths, dtype=torch.int64, device=values.device)
        return (values / sizes.repeat_interleave(sizes)).sum()


def policy_loss(
    tokens: PolicyTokens,
    surrogate: Surrogate,
    entropy: torch.Tensor,  # (R,) of the policy that is trained
    average: Average,
    *,
    weights: torch.Tensor | None = None,  # (R,) of the surrogate, without gradient
    ref_logprobs: torch.Tensor | None = None,  # (R,) for a KL penalty in the loss
    kl_estimator: KLEstimator = "k3",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> tuple[torch.Tensor, Sums]:
    """The weighted surrogate, plus the KL penalty, less the entropy bonus.

    Returns:
        The loss, and ``pg_loss``, ``entropy``, ``ppo_kl`` (k1 estimate of KL(old || new)), ``pg_clipfrac`` (tokens at
        which the clip range decided), and ``kl_loss`` (before its weight) where there is one.
    """
    lengths = tokens.lengths
    num_tokens, count = tokens.logprobs.numel(), average.count(lengths)
    per_token = surrogate.loss if weights is None else surrogate.loss * weights
    loss = average.total(per_token, lengths)
    log_ratio = tokens.logprobs.detach() - tokens.old_logprobs
    sums: Sums = {
        "pg_loss": (loss.detach(), count),
        "entropy": (entropy.detach().sum(), num_tokens),
        "ppo_kl": (-log_ratio.sum(), num_tokens),
        "pg_clipfrac": (surrogate.clipped.sum(), num_tokens),
    }
    if ref_logprobs is not None:
        kl = average.total(kl_estimate(tokens.logprobs, ref_logprobs, kl_estimator), lengths)
        loss = loss + kl_coef * kl
        sums["kl_loss"] = (kl.detach(), count)
    if entropy_coef:
        # Left out at 0: the entropy's gradient would cost a pass over the logits for nothing.
        loss = loss - entropy_coef * average.total(entropy, lengths)
    return loss / average.denominator, sums
