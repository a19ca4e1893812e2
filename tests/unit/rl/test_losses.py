"""The policy's loss as a whole: aggregations, KL and entropy against loops, and no dependence on how it is split."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid.algorithms import ALGORITHMS
from hybrid.rl.advantages import token_rewards
from hybrid.rl.algorithms.registry import find_algorithm
from hybrid.rl.loss import Average, policy_loss
from hybrid.rl.records import ClipRange, PolicyTokens

LENGTHS = [4, 1, 8, 3, 6]
AGGREGATIONS = ["token_mean", "sequence_mean", "sum_over_constant"]
LONGEST = 9


def _data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    logprobs = -torch.rand(count, generator=generator, dtype=torch.float64) * 3

    def noise(scale=1.0):
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    return {
        "logprobs": logprobs,
        "old": logprobs + noise(0.4),
        "ref": logprobs + noise(0.4),
        "advantages": noise(),
        "entropy": noise().abs(),
        "weights": noise().abs(),
    }


def _run(data, order, splits, name, aggregation, **options):
    """The loss and the gradient, by sequence, of sequences in this order, cut into micro-batches after ``splits``."""
    parts = {key: value.split(LENGTHS) for key, value in data.items()}
    leaves = [part.clone().requires_grad_() for part in parts["logprobs"]]
    entropies = [part.clone().requires_grad_() for part in parts["entropy"]]
    average = Average(aggregation, sum(LENGTHS), len(LENGTHS), LONGEST)
    total, sums = 0.0, {}
    bounds = [0, *splits, len(order)]
    for low, high in zip(bounds, bounds[1:], strict=False):
        members = order[low:high]

        def join(pieces, members=members):
            return torch.cat([pieces[i] for i in members]) if members else torch.zeros(0).requires_grad_()

        tokens = PolicyTokens(
            join(leaves), join(parts["old"]), join(parts["advantages"]), [LENGTHS[i] for i in members]
        )
        loss, found = policy_loss(
            tokens,
            find_algorithm(name).objective(tokens, ClipRange(low=0.2, high=0.3)),
            join(entropies),
            average,
            weights=join(parts["weights"]),
            ref_logprobs=join(parts["ref"]),
            **options,
        )
        loss.backward()
        total += float(loss.detach())
        for key, (value, count) in found.items():
            before = sums.get(key, (0.0, 0))
            sums[key] = (before[0] + float(value.detach()), before[1] + count)
    return total, torch.cat([leaf.grad for leaf in leaves]), {key: value / n for key, (value, n) in sums.items()}


OPTIONS = {"kl_estimator": "k3", "kl_coef": 0.05, "entropy_coef": 0.01}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_loss_gradient_and_metrics_do_not_depend_on_split_or_order(name, aggregation):
    data, options = _data(), OPTIONS
    loss, gradient, sums = _run(data, [0, 1, 2, 3, 4], [], name, aggregation, **options)
    for order, splits in (
        ([0, 1, 2, 3, 4], [1, 2, 3, 4]),
        ([4, 2, 0, 3, 1], [2]),
        ([3, 1, 4, 0, 2], [0, 3, 3]),  # empty micro-batches
    ):
        other, other_gradient, other_sums = _run(data, order, splits, name, aggregation, **options)
        assert other == pytest.approx(loss, rel=1e-9)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-9, atol=1e-12)
        assert other_sums == pytest.approx(sums, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_token_by_token(aggregation, estimator):
    data = _data(1)
    loss, _, sums = _run(
        data, [0, 1, 2, 3, 4], [], "grpo", aggregation, kl_estimator=estimator, kl_coef=0.05, entropy_coef=0.01
    )
    columns = {key: [part.tolist() for part in value.split(LENGTHS)] for key, value in data.items()}
    means = {"loss": 0.0, "pg_loss": 0.0, "kl_loss": 0.0}
    for i, length in enumerate(LENGTHS):
        per_token = {
            "token_mean": 1 / sum(LENGTHS),
            "sequence_mean": 1 / (len(LENGTHS) * length),
            "sum_over_constant": 1 / (len(LENGTHS) * LONGEST),
        }[aggregation]
        for t in range(length):
            row = {key: value[i][t] for key, value in columns.items()}
            ratio = math.exp(row["logprobs"] - row["old"])
            gain = min(ratio * row["advantages"], min(max(ratio, 0.8), 1.3) * row["advantages"])
            apart = row["logprobs"] - row["ref"]
            kl = {"k1": apart, "k2": apart**2 / 2, "k3": math.exp(-apart) - 1 + apart}[estimator]
            means["pg_loss"] -= per_token * row["weights"] * gain
            means["kl_loss"] += per_token * kl
            means["loss"] -= per_token * (row["weights"] * gain - 0.05 * kl + 0.01 * row["entropy"])
    assert loss == pytest.approx(means["loss"], abs=1e-6)
    assert sums["pg_loss"] == pytest.approx(means["pg_loss"], abs=1e-6)
    assert sums["kl_loss"] == pytest.approx(means["kl_loss"], abs=1e-6)


def test_the_gradient_of_k2_is_that_of_the_kl_and_k1s_is_nothing():
    """Over the whole vocabulary, weighted by the policy, at the policy that sampled."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.log_softmax(torch.randn(20, generator=generator, dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    weights = logprobs.exp().detach()
    zeros = torch.zeros(20, dtype=torch.float64)

    def gradient(estimator):
        tokens = PolicyTokens(logprobs, logprobs.detach(), zeros, [1] * 20)
        surrogate = find_algorithm("grpo").objective(tokens, ClipRange(low=0.2, high=0.2))
        grads = []
        for i in range(20):
            one = PolicyTokens(logprobs[i : i + 1], tokens.old_logprobs[i : i + 1], zeros[:1], [1])
            surrogate = find_algorithm("grpo").objective(one, ClipRange(low=0.2, high=0.2))
            loss, _ = policy_loss(
                one,
                surrogate,
                zeros[:1],
                Average("token_mean", 1, 1, 1),
                ref_logprobs=ref[i : i + 1],
                kl_estimator=estimator,
                kl_coef=1.0,
            )
            grads.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
        return (weights[:, None] * torch.stack(grads)).sum(0)

    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient("k2"), true)
    torch.testing.assert_close(gradient("k1"), torch.zeros_like(true))


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
