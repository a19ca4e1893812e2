"""Generalised advantage estimation over sequences of unequal length, and statistics of tokens over all ranks.

Schulman et al. 2015, https://arxiv.org/abs/1506.02438.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

Reduce = Callable[[list[float]], list[float]]
"""Adds up a few numbers over all ranks."""


def gae(
    rewards: Sequence[torch.Tensor],  # S tensors (R_i,)
    values: Sequence[torch.Tensor],  # S tensors (R_i,)
    *,
    gamma: float,
    lam: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Advantages and returns of each token, S tensors (R_i,) fp32 each.

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``; the return is
    ``A_t + V_t``. The value after the last token is 0, for a completion cut off by its length as for one that
    stopped, as in DeepSpeed-Chat.
    """
    if not rewards:
        return [], []
    lengths = [reward.numel() for reward in rewards]
    # Zeros after the last token are exactly what the recursion starts from.
    rewards_ST = pad_sequence([reward.float() for reward in rewards], batch_first=True)
    values_ST = pad_sequence([value.float() for value in values], batch_first=True)
    next_values_ST = torch.zeros_like(values_ST)
    next_values_ST[:, :-1] = values_ST[:, 1:]
    advantages_ST = rewards_ST + gamma * next_values_ST - values_ST
    for t in range(max(lengths) - 2, -1, -1):
        advantages_ST[:, t] += gamma * lam * advantages_ST[:, t + 1]
    returns_ST = advantages_ST + values_ST
    return (
        [row[:length] for row, length in zip(advantages_ST, lengths, strict=True)],
        [row[:length] for row, length in zip(returns_ST, lengths, strict=True)],
    )


def whiten(tensors: Sequence[torch.Tensor], reduce: Reduce) -> list[torch.Tensor]:
    """Shift and scale to mean 0 and (unbiased) variance 1 over every element of every rank.

    Every rank must call it, a rank without tensors too. Statistics are taken in two passes, the second around the
    mean, since a variance from sums of squares cancels.
    """
    flat = _concatenate(tensors)
    count, total = reduce([float(flat.numel()), float(flat.sum())])
    mean = total / max(count, 1.0)
    (squares,) = reduce([float((flat - mean).square().sum())])
    std = (squares / max(count - 1.0, 1.0) + 1e-8) ** 0.5
    return [(tensor - mean) / std for tensor in tensors]


def explained_variance(values: Sequence[torch.Tensor], returns: Sequence[torch.Tensor], reduce: Reduce) -> float:
    """``1 - var(returns - values) / var(returns)`` over every token of every rank; 0 where the returns do not vary.

    Every rank must call it, a rank without tokens too.
    """
    target = _concatenate(returns)
    error = target - _concatenate(values)
    count, target_sum, error_sum = reduce([float(target.numel()), float(target.sum()), float(error.sum())])
    count = max(count, 1.0)
    target_squares, error_squares = reduce(
        [float((target - target_sum / count).square().sum()), float((error - error_sum / count).square().sum())]
    )
    return 1.0 - error_squares / target_squares if target_squares > 0 else 0.0


def _concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in fp64, none of them where there are no tensors."""
    return torch.cat([tensor.double() for tensor in tensors]) if tensors else torch.zeros(0, dtype=torch.float64)
