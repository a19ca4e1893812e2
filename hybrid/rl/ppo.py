"""Proximal policy optimisation: rewards per token, clipped policy loss, clipped value loss. Pure functions.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, in the form that InstructGPT and DeepSpeed-Chat give it for
language models (https://arxiv.org/abs/2203.02155, https://arxiv.org/abs/2308.01320). Defaults there: clip ranges 0.2,
KL coefficient 0.1, reward clipped to 5.

Losses are sums over the tokens at hand divided by ``num_tokens``, the count of the whole minibatch over all ranks and
micro-batches, so that their gradients add up to the same whatever the split. Metrics are sums over the tokens at hand,
for the same reason. Both are over (R,) tensors that may be empty.
"""

from __future__ import annotations

import torch

Sums = dict[str, torch.Tensor]
"""Scalars without gradient, to be added up and divided by the number of tokens."""


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


def policy_loss(
    logprobs: torch.Tensor,  # (R,) under the policy that is trained
    old_logprobs: torch.Tensor,  # (R,) under the policy at the start of the step
    advantages: torch.Tensor,  # (R,)
    entropy: torch.Tensor,  # (R,) of the policy that is trained
    *,
    cliprange: float,
    entropy_coef: float,
    num_tokens: int,
) -> tuple[torch.Tensor, Sums]:
    """Clipped surrogate ``max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps))`` less the entropy bonus.

    Returns:
        The loss, and the sums ``pg_loss``, ``entropy``, ``ppo_kl`` (k1 estimate of KL(old || new)) and ``pg_clipfrac``
        (tokens at which the clipped term is the larger one).
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    pg_loss = torch.maximum(unclipped, clipped).sum()
    loss = pg_loss
    if entropy_coef:
        # Left out at 0: the entropy's gradient would cost a pass over the logits for nothing.
        loss = loss - entropy_coef * entropy.sum()
    sums = {
        "pg_loss": pg_loss.detach(),
        "entropy": entropy.detach().sum(),
        "ppo_kl": -log_ratio.detach().sum(),
        "pg_clipfrac": (clipped > unclipped).sum(),
    }
    return loss / num_tokens, sums


def value_loss(
    values: torch.Tensor,  # (R,) of the critic that is trained
    old_values: torch.Tensor,  # (R,) of the critic at the start of the step
    returns: torch.Tensor,  # (R,)
    *,
    cliprange_value: float,
    vf_coef: float,
    num_tokens: int,
) -> tuple[torch.Tensor, Sums]:
    """``1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)``, weighted.

    Returns:
        The loss, and the sums ``vf_loss`` (before its weight) and ``vf_clipfrac`` (tokens at which the clipped term is
        the larger one).
    """
    clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    vf_loss = torch.maximum(unclipped, clipped).sum() / 2
    sums = {"vf_loss": vf_loss.detach(), "vf_clipfrac": (clipped > unclipped).sum()}
    return vf_coef * vf_loss / num_tokens, sums
