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


def _gains(name, new, old, advantages):
    """What is maximised at each token of one sequence, by the papers' formulas, at clip range 0.2 and 0.3."""
    ratios = [(a - b).exp() for a, b in zip(new, old, strict=True)]
    if name == "gspo":  # Zheng et al. 2025, section 4.3: the sequence's ratio, with the token's own gradient
        mean = math.exp(sum(float(a.detach() - b) for a, b in zip(new, old, strict=True)) / len(new))
        ratios = [mean * a.exp() / float(a.detach().exp()) for a in new]
    gains = []
    for logprob, ratio, advantage in zip(new, ratios, advantages, strict=True):
        bounded = min(max(float(ratio.detach()), 0.8), 1.3)
        if name == "rloo":  # Ahmadian et al. 2024, equation 6
            gains.append(advantage * logprob)
        elif name == "cispo":  # MiniMax-M1, equation 4
            gains.append(bounded * advantage * logprob)
        else:  # Schulman et al. 2017, equation 7
            is_clipped = bounded * advantage < float(ratio.detach()) * advantage
            gains.append(torch.tensor(bounded * advantage, dtype=torch.float64) if is_clipped else ratio * advantage)
    return gains


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_loss_and_gradient_token_by_token(name, aggregation, estimator):
    data = _data(1)
    loss, gradient, sums = _run(
        data, [0, 1, 2, 3, 4], [], name, aggregation, kl_estimator=estimator, kl_coef=0.05, entropy_coef=0.01
    )
    leaf = data["logprobs"].clone().requires_grad_()
    columns = {key: [part.tolist() for part in value.split(LENGTHS)] for key, value in data.items()}
    expected, means = torch.zeros((), dtype=torch.float64), {"pg_loss": 0.0, "kl_loss": 0.0, "ppo_kl": 0.0}
    for i, (length, sequence) in enumerate(zip(LENGTHS, leaf.split(LENGTHS), strict=True)):
        share = {
            "token_mean": 1 / sum(LENGTHS),
            "sequence_mean": 1 / (len(LENGTHS) * length),
            "sum_over_constant": 1 / (len(LENGTHS) * LONGEST),
        }[aggregation]
        new = [sequence[t] for t in range(length)]
        gains = _gains(name, new, columns["old"][i], columns["advantages"][i])
        for t in range(length):
            apart = new[t] - columns["ref"][i][t]
            kl = {"k1": apart, "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}[estimator]
            weighted = columns["weights"][i][t] * gains[t]
            expected = expected - share * (weighted - 0.05 * kl + 0.01 * columns["entropy"][i][t])
            means["pg_loss"] -= share * float(weighted.detach())
            means["kl_loss"] += share * float(kl.detach())
            means["ppo_kl"] += (columns["old"][i][t] - float(new[t].detach())) / sum(LENGTHS)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-9)
    assert {key: sums[key] for key in means} == pytest.approx(means, rel=1e-6, abs=1e-9)


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
