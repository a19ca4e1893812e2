"""KL estimators against the true divergence, controllers against the paper's update."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid.rl.kl import AdaptiveKLController, FixedKLController, kl_estimate, make_kl_controller


def _distributions():
    generator = torch.Generator().manual_seed(0)
    p = torch.log_softmax(torch.randn(50, generator=generator), -1)
    q = torch.log_softmax(p + 0.3 * torch.randn(50, generator=generator), -1)
    return p, q


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_is_the_kl(estimator):
    """Both are unbiased: weighted by the policy over the whole vocabulary they give KL(policy || reference) exactly."""
    p, q = _distributions()
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )
    torch.testing.assert_close((p.exp() * kl_estimate(p, q, estimator)).sum(), expected)


def test_formulas():
    lp, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    for estimator, formula in {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }.items():
        expected = torch.tensor([formula(float(a - b)) for a, b in zip(lp, ref, strict=True)])
        torch.testing.assert_close(kl_estimate(lp, ref, estimator), expected)


def test_k2_and_k3_are_never_negative_and_k3_stays_finite():
    lp, ref = torch.tensor([-1000.0, 0.0, -3.0]), torch.tensor([0.0, -1000.0, -3.0])
    for estimator in ("k2", "k3"):
        estimate = kl_estimate(lp, ref, estimator)
        assert (estimate >= 0).all() and estimate.isfinite().all()


def test_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_adaptive_controller_follows_ziegler():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10_000)
    coef = 0.2
    for kl, samples in [(12.0, 256), (6.3, 256), (1.0, 64), (6.0, 100)]:
        controller.update(kl, samples)
        coef *= 1 + max(-0.2, min(0.2, kl / 6.0 - 1)) * samples / 10_000
        assert controller.coef == pytest.approx(coef)


def test_controllers_resume():
    adaptive = AdaptiveKLController(0.2, target=6.0, horizon=100)
    adaptive.update(60.0, 10)
    resumed = make_kl_controller(0.2, 6.0, 100)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coef == adaptive.coef > 0.2


def test_fixed_controller_stays():
    controller = make_kl_controller(0.1, None, 100)
    controller.update(1e9, 1000)
    assert type(controller) is FixedKLController and controller.coef == 0.1


def test_adaptive_controller_refuses_a_target_of_nothing():
    with pytest.raises(ValueError, match="kl_target"):
        AdaptiveKLController(0.1, target=0.0, horizon=100)
