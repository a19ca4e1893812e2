"""What advantages are made with: sums over sequences and groups of unequal size, statistics over all ranks.

Every function that takes ``reduce`` must be called by every rank, a rank without sequences too. Statistics are taken in
two passes, the second around the mean, since a variance from sums of squares cancels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from hybrid.rl.records import AdvantageInputs, Reduce

_EPSILON = 1e-8


def token_rewards(
    kl: torch.Tensor,  # (R,) estimated KL to the reference at each token
    reward: float,
    *,
    kl_coef: float,
    reward_clip: float,
) -> torch.Tensor:
    """(R,) reward of each token: minus the KL penalty, and the clipped reward of the whole on the last one.

    The last token is the last that was sampled, whether an EOS or where the length limit fell.
    """
    rewards = -kl_coef * kl
    if rewards.numel():
        rewards[-1] += min(max(reward, -reward_clip), reward_clip)
    return rewards


def gae(
    rewards: Sequence[torch.Tensor],  # S tensors (R_i,)
    values: Sequence[torch.Tensor],  # S tensors (R_i,)
    *,
    gamma: float,
    lam: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Generalised advantage estimation: advantages and returns of each token, S tensors (R_i,) fp32 each.

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``; the return is
    ``A_t + V_t``. The value after the last token is 0, for a completion cut off by its length as for one that
    stopped, as in DeepSpeed-Chat. Schulman et al. 2015, https://arxiv.org/abs/1506.02438.
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


def rewards_to_go(rewards: Sequence[torch.Tensor], gamma: float) -> list[torch.Tensor]:
    """S tensors (R_i,) fp32: the discounted rewards of each token and those after it."""
    zeros = [torch.zeros_like(reward) for reward in rewards]
    return gae(rewards, zeros, gamma=gamma, lam=1.0)[0]


def sequence_scores(inputs: AdvantageInputs) -> torch.Tensor:
    """(S,) fp64 on the CPU: each sequence's rewards added up, a KL penalty among them included."""
    if not inputs.rewards:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([reward.double().sum() for reward in inputs.rewards]).cpu()


def over_tokens(scores: torch.Tensor, inputs: AdvantageInputs) -> list[torch.Tensor]:
    """(S,) -> S tensors (R_i,) fp32: a sequence's advantage is that of each of its tokens."""
    pairs = zip(inputs.rewards, scores.tolist(), strict=True)
    return [torch.full_like(reward, score, dtype=torch.float32) for reward, score in pairs]


def group_statistics(
    values: torch.Tensor,  # (E,) fp64 on the CPU
    groups: torch.Tensor,  # (E,) int64, the group of each
    num_groups: int,
    reduce: Reduce,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each element its group's count over all ranks, mean and (unbiased) standard deviation, (E,) each."""

    def per_group(addends: torch.Tensor) -> torch.Tensor:
        local = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, addends)
        return torch.tensor(reduce(local.tolist()), dtype=torch.float64)

    counts = per_group(torch.ones_like(values))
    means = per_group(values) / counts.clamp(min=1)
    squares = per_group((values - means[groups]).square())
    stds = (squares / (counts - 1).clamp(min=1)).sqrt()
    return counts[groups], means[groups], stds[groups]


def score_statistics(inputs: AdvantageInputs, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`group_statistics` of sequences' scores, (S,) each."""
    groups = torch.tensor(inputs.groups, dtype=torch.int64)
    return group_statistics(scores, groups, inputs.num_groups, inputs.reduce)


def whiten(tensors: Sequence[torch.Tensor], reduce: Reduce) -> list[torch.Tensor]:
    """Shift and scale to mean 0 and (unbiased) variance 1 over every element of every rank."""
    flat = _concatenate(tensors)
    count, total = reduce([float(flat.numel()), float(flat.sum())])
    mean = total / max(count, 1.0)
    (squares,) = reduce([float((flat - mean).square().sum())])
    std = (squares / max(count - 1.0, 1.0) + _EPSILON) ** 0.5
    return [(tensor - mean) / std for tensor in tensors]


def whiten_groups(
    tensors: Sequence[torch.Tensor], groups: Sequence[int], num_groups: int, reduce: Reduce
) -> list[torch.Tensor]:
    """`whiten` over the elements of each group by themselves; ``groups`` says which one each tensor is of."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = _concatenate(tensors).cpu()
    places = torch.tensor(groups, dtype=torch.int64).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    _, means, stds = group_statistics(flat, places, num_groups, reduce)
    white = ((flat - means) / (stds.square() + _EPSILON).sqrt()).float()
    return [part.to(tensor.device) for part, tensor in zip(white.split(sizes), tensors, strict=True)] if sizes else []


def explained_variance(values: Sequence[torch.Tensor], returns: Sequence[torch.Tensor], reduce: Reduce) -> float:
    """``1 - var(returns - values) / var(returns)`` over every token of every rank; 0 where the returns do not vary."""
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
