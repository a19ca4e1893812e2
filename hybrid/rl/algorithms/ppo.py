"""Proximal policy optimisation: clipped surrogate, clipped value loss, advantages from a critic.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, in the form that InstructGPT and DeepSpeed-Chat give it for
language models (https://arxiv.org/abs/2203.02155, https://arxiv.org/abs/2308.01320). Defaults there: clip ranges 0.2,
KL coefficient 0.1, reward clipped to 5.
"""

from __future__ import annotations

import torch

from hybrid.rl.advantages import gae
from hybrid.rl.records import AdvantageInputs, Advantages, ClipRange, PolicyTokens, Surrogate

_MAX_LOG_RATIO = 20.0


def advantages(inputs: AdvantageInputs) -> Advantages:
    """Generalised advantage estimation, and the returns that the critic is fitted to."""
    return Advantages(*gae(inputs.rewards, inputs.values, gamma=inputs.gamma, lam=inputs.lam))


def clipped_surrogate(tokens: PolicyTokens, clip: ClipRange) -> Surrogate:
    """``max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high))`` at each token.

    With ``clip.dual`` no more than ``-dual * A`` where A is negative (Ye et al. 2019, equation 3,
    https://arxiv.org/abs/1912.09729, which sets it to 3).
    """
    return surrogate_of(bounded_ratio(tokens.logprobs - tokens.old_logprobs), tokens.advantages, clip)


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp`` of log-ratios up to 20, far beyond any clip range: the gradient of an infinite ratio is not finite."""
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def surrogate_of(ratio: torch.Tensor, advantages: torch.Tensor, clip: ClipRange) -> Surrogate:
    """The same of a ratio, (R,), however it came about."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss, decided = torch.maximum(unclipped, clipped), clipped > unclipped
    if clip.dual is not None:
        bound = -clip.dual * advantages
        beyond = (advantages < 0) & (loss > bound)
        loss, decided = torch.where(beyond, bound, loss), decided | beyond
    return Surrogate(loss, decided)


def value_loss(
    values: torch.Tensor,  # (R,) of the critic that is trained
    old_values: torch.Tensor,  # (R,) of the critic at the start of the step
    returns: torch.Tensor,  # (R,)
    *,
    cliprange_value: float,
    vf_coef: float,
    num_tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)``, weighted, over tokens that may be none.

    Args:
        num_tokens: of the whole minibatch, over all ranks and micro-batches.

    Returns:
        The loss, and sums over the tokens at hand: ``vf_loss`` (before its weight) and ``vf_clipfrac`` (tokens at
        which the clipped term is the larger one).
    """
    clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    vf_loss = torch.maximum(unclipped, clipped).sum() / 2
    sums = {"vf_loss": vf_loss.detach(), "vf_clipfrac": (clipped > unclipped).sum()}
    return vf_coef * vf_loss / num_tokens, sums
