"""PPO's formulas against transcriptions written token by token, and their independence of the split."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from hybrid.rl.ppo import policy_loss, token_rewards, value_loss


def _tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    return {
        "logprobs": logprobs.requires_grad_(),
        "old_logprobs": logprobs.detach() + 0.4 * torch.randn(count, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(count, generator=generator, dtype=torch.float64),
        "entropy": torch.rand(count, generator=generator, dtype=torch.float64).requires_grad_(),
        "values": torch.randn(count, generator=generator, dtype=torch.float64).requires_grad_(),
        "old_values": torch.randn(count, generator=generator, dtype=torch.float64),
        "returns": torch.randn(count, generator=generator, dtype=torch.float64),
    }


def _policy(tokens, part, num_tokens, entropy_coef=0.01):
    return policy_loss(
        *(tokens[name][part] for name in ("logprobs", "old_logprobs", "advantages", "entropy")),
        cliprange=0.2,
        entropy_coef=entropy_coef,
        num_tokens=num_tokens,
    )


def _value(tokens, part, num_tokens):
    return value_loss(
        *(tokens[name][part] for name in ("values", "old_values", "returns")),
        cliprange_value=0.2,
        vf_coef=0.5,
        num_tokens=num_tokens,
    )


ALL = slice(None)


def test_policy_loss_token_by_token():
    tokens = _tokens(200)
    loss, sums = _policy(tokens, ALL, 200)
    pg, clipped_tokens, kl = 0.0, 0, 0.0
    for new, old, advantage in zip(tokens["logprobs"], tokens["old_logprobs"], tokens["advantages"], strict=True):
        ratio = math.exp(float((new - old).detach()))
        surrogate = ratio * float(advantage)
        clipped = min(max(ratio, 0.8), 1.2) * float(advantage)
        pg -= min(surrogate, clipped)
        clipped_tokens += clipped < surrogate
        kl += float((old - new).detach())
    entropy = float(tokens["entropy"].detach().sum())
    assert float(loss.detach()) == pytest.approx((pg - 0.01 * entropy) / 200)
    assert {name: float(total) for name, total in sums.items()} == pytest.approx(
        {"pg_loss": pg, "entropy": entropy, "ppo_kl": kl, "pg_clipfrac": clipped_tokens}
    )
    assert 0 < clipped_tokens < 200


def test_policy_gradient_is_zero_where_clipped_and_the_surrogate_elsewhere():
    tokens = _tokens(200)
    _policy(tokens, ALL, 200, entropy_coef=0.0)[0].backward()
    assert tokens["entropy"].grad is None
    ratio = (tokens["logprobs"] - tokens["old_logprobs"]).exp().detach()
    advantages = tokens["advantages"]
    clipped = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    torch.testing.assert_close(tokens["logprobs"].grad, torch.where(clipped, 0.0, -advantages * ratio / 200))


def test_first_update_is_the_plain_policy_gradient():
    tokens = _tokens(10)
    tokens["old_logprobs"] = tokens["logprobs"].detach()
    loss, sums = _policy(tokens, ALL, 10, entropy_coef=0.0)
    loss.backward()
    torch.testing.assert_close(tokens["logprobs"].grad, -tokens["advantages"] / 10)
    assert sums["pg_clipfrac"] == 0 and sums["ppo_kl"] == 0


def test_value_loss_token_by_token():
    tokens = _tokens(200)
    loss, sums = _value(tokens, ALL, 200)
    total, clipped_tokens = 0.0, 0
    for value, old, ret in zip(*(tokens[n].tolist() for n in ("values", "old_values", "returns")), strict=True):
        plain = (value - ret) ** 2
        clipped = (min(max(value, old - 0.2), old + 0.2) - ret) ** 2
        total += 0.5 * max(plain, clipped)
        clipped_tokens += clipped > plain
    assert float(loss.detach()) == pytest.approx(0.5 * total / 200)
    assert float(sums["vf_loss"]) == pytest.approx(total) and int(sums["vf_clipfrac"]) == clipped_tokens > 0


@pytest.mark.parametrize("bounds", [[0, 60], [0, 1, 2, 60], [0, 30, 30, 60], [0, 17, 41, 60]])
def test_losses_gradients_and_metrics_do_not_depend_on_the_split(bounds):
    whole, split = _tokens(60), _tokens(60)
    for function, leaf in ((_policy, "logprobs"), (_value, "values")):
        loss, sums = function(whole, ALL, 60)
        loss.backward()
        parts = [function(split, slice(a, b), 60) for a, b in pairwise(bounds)]
        for part, _ in parts:
            part.backward()
        torch.testing.assert_close(sum(part.detach() for part, _ in parts), loss.detach())
        torch.testing.assert_close(split[leaf].grad, whole[leaf].grad)
        for name, total in sums.items():
            torch.testing.assert_close(sum(part[name] for _, part in parts), total)


def test_losses_of_no_tokens_are_zero_and_connected():
    tokens = _tokens(0)
    for loss, _ in (_policy(tokens, ALL, 7), _value(tokens, ALL, 7)):
        assert loss == 0
        loss.backward()
    assert tokens["logprobs"].grad is not None and tokens["values"].grad is not None


@pytest.mark.parametrize(("reward", "clipped"), [(2.0, 2.0), (9.0, 5.0), (-9.0, -5.0), (0.0, 0.0)])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_reward_lands_on_the_last_token(reward, clipped, length):
    """A completion that stopped ends in its EOS, one that was cut off in the token at the limit; both are the last."""
    kl = torch.arange(1.0, length + 1)
    rewards = token_rewards(kl, reward, kl_coef=0.1, reward_clip=5.0)
    expected = [-0.1 * t for t in range(1, length + 1)]
    expected[-1] += clipped
    torch.testing.assert_close(rewards, torch.tensor(expected))
    assert kl[-1] == length  # the input is left alone


def test_reward_of_an_empty_completion_is_nowhere():
    assert token_rewards(torch.zeros(0), 3.0, kl_coef=0.1, reward_clip=5.0).shape == (0,)
