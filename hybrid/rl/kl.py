"""How far the policy is from its reference: per-token estimators, and who sets the penalty's weight."""

from __future__ import annotations

from typing import Any

import torch

from hybrid.algorithms import KLEstimator

# exp() of more overflows fp32's usefulness as a penalty long before its range.
_MAX_LOG_RATIO = 20.0


def kl_estimate(
    logprobs: torch.Tensor,  # (R,) of the sampled tokens, under the policy
    ref_logprobs: torch.Tensor,  # (R,)
    estimator: KLEstimator,
) -> torch.Tensor:
    """(R,) estimate of KL(policy || reference) at each token, from the sampled token alone.

    http://joschu.net/blog/kl-approx.html: ``k1`` is unbiased and may be negative; ``k2`` is biased with low variance;
    ``k3`` is unbiased and never negative. In k3 the log-ratio is capped at 20.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        log_ratio = log_ratio.clamp(max=_MAX_LOG_RATIO)
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}; set --kl_estimator to k1, k2 or k3")


class FixedKLController:
    """The coefficient stays what it was set to."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_samples: int) -> None:
        """Takes note of nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: the coefficient is the configuration's, which may have been changed on purpose."""


class AdaptiveKLController(FixedKLController):
    """Raises the coefficient while the KL is above its target and lowers it below.

    Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593: a proportional controller on the relative
    error, clipped to 20%, over a horizon counted in samples. Target and KL are in nats per sequence, which is the
    logged KL per token times the mean length.
    """

    def __init__(self, coef: float, *, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"{target=} and {horizon=} must be positive; without --kl_target the coefficient is fixed")
        super().__init__(coef)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Move the coefficient by one batch of ``num_samples`` whose mean KL per sequence was ``kl``."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_samples / self.horizon

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = state["coef"]


def make_kl_controller(coef: float, target: float | None, horizon: float) -> FixedKLController:
    """Adaptive where there is a target, fixed otherwise."""
    return FixedKLController(coef) if target is None else AdaptiveKLController(coef, target=target, horizon=horizon)
